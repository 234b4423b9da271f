"""Weights divided over processes (FSDP2): one process's curve, read back by any number of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from normattn.errors import DivergedError, InputError, Interrupted
from normattn.lab.runs import Checkpoints, read_metrics, read_status
from normattn.lab.training.loop import train

from .group import CURVE, FSDP, MODEL, STEPS, diverge, go, together, without_room
from .settings import small
from .test_distribution import losses
from .toy import ToyTask, config, open_run

TESTS = Path(__file__).parents[1]


def weights(out: Path) -> dict[str, Tensor]:
    return load_file(out / "model/model.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training in one process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    go(0, out, CURVE)
    return out


def assert_like(out: Path, alone: Path) -> None:
    """The same curve and the same model but for rounding."""
    assert len(losses(out)) == STEPS
    assert losses(out) == pytest.approx(losses(alone), rel=1e-5)
    ours, theirs = weights(out), weights(alone)
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-3, atol=1e-4)


def test_what_one_wrote_four_read_then_two_then_one(
    alone: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, done = tmp_path / "run", 2
    newest: Path | None = None
    with pytest.raises(Interrupted):
        go(0, out, CURVE, done)
    for processes, steps in ((4, 2), (2, 2)):
        said = together(processes, go, out, FSDP, steps)
        assert [kind for kind, _ in said] == [Interrupted] * processes, said
        done += steps
        status = read_status(out)
        assert status is not None
        assert (status.state, status.step) == ("interrupted", done)
        newest = Checkpoints(out / "checkpoints").last_path()
        assert newest is not None
        assert newest.name == f"step-{done:08d}"
        kinds = sorted(file.suffix for file in newest.iterdir())
        assert kinds == [".json"] + [".safetensors"] * processes
    # A damaged part is named, and the checkpoint before it goes on.
    assert newest is not None
    part = sorted(newest.glob("*.safetensors"))[-1]
    part.write_bytes(part.read_bytes()[:-1])
    capfd.readouterr()
    go(0, out, CURVE)
    assert f"step-{done:08d} is damaged: its parts do not match" in capfd.readouterr().err
    assert_like(out, alone)


def test_stopped_and_gone_on_is_to_the_bit_what_was_never_stopped(tmp_path: Path) -> None:
    """Checkpoints are written while weights already change: what they hold is their own step's."""
    changes = {**FSDP, "checkpoint_seconds": 0.0, "keep": [3]}
    for steps in (4, None):
        said = together(2, go, tmp_path / "run", changes, steps)
        assert len(said) == 2
    together(2, go, tmp_path / "whole", FSDP | {"keep": [3]})
    ours, whole = tmp_path / "run", tmp_path / "whole"
    assert read_metrics(ours / "metrics.jsonl") == read_metrics(whole / "metrics.jsonl")
    for model in ("model", "kept/step-00000003"):
        file = f"{model}/model.safetensors"
        assert (ours / file).read_bytes() == (whole / file).read_bytes()


def test_half_precision_is_that_of_one_process(tmp_path: Path) -> None:
    half = {"precision": "bf16"}
    go(0, tmp_path / "one", {**CURVE, **half})
    together(2, go, tmp_path / "two", {**FSDP, **half, "activation_checkpointing": True})
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert two == pytest.approx(one, rel=5e-3)
    assert all(weight.dtype == torch.float32 for weight in weights(tmp_path / "two").values())


@pytest.mark.parametrize("split", [pytest.param(None, marks=pytest.mark.thorough), "heads"])
def test_muon_and_qk_clip_are_those_of_one_process(split: str | None, tmp_path: Path) -> None:
    """Of the 45 rows of q, k and v one process holds 23, the other 22, and a head has 5."""
    sizes = {"dim": 15, "heads": 3}
    model = {**MODEL, **sizes, "score": "Baseline-NoPE", "placement": "PreLN"}
    optimiser = {"name": "muon", "split": split}
    changes = {"model": model, "qk_clip": 0.3, "optimiser": optimiser}
    go(0, tmp_path / "one", {**CURVE, **changes})
    for steps in (5, None):  # Stopped after five steps, then on to the end.
        together(2, go, tmp_path / "two", {**FSDP, **changes}, steps)
    one, two = tmp_path / "one", tmp_path / "two"
    assert losses(two) == pytest.approx(losses(one), rel=1e-3)
    clipped = [line["largest_logit"] for line in read_metrics(one / "metrics.jsonl")]
    assert max(clipped) > 0.3
    ours, theirs = weights(two), weights(one)
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=2e-2, atol=2e-3)


def test_divergence_is_said_by_all_and_the_step_before_is_kept(tmp_path: Path) -> None:
    said = together(2, diverge, tmp_path / "run")
    assert [kind for kind, _ in said] == [DivergedError] * 2, said
    assert "resume with parallel ddp to have it named" in said[0][1]
    last = Checkpoints(tmp_path / "run/checkpoints").latest()
    assert last is not None
    assert (last.step, last.sharded) == (3, True)


def test_a_part_that_cannot_be_written_is_said_by_all(tmp_path: Path) -> None:
    said = together(2, without_room, tmp_path / "run")
    assert [kind for kind, _ in said] == [InputError] * 2, said
    assert all("no space left on the disk" in each for _, each in said)
    assert Checkpoints(tmp_path / "run/checkpoints").latest() is None


@pytest.mark.thorough
def test_a_killed_process_is_begun_again_and_the_curve_goes_on(tmp_path: Path) -> None:
    """SIGKILL of one process under torchrun's elastic restart."""
    path = os.pathsep.join([str(TESTS.parent / "src"), *filter(None, sys.path)])
    options = {"steps": STEPS, "parallel": "fsdp", "checkpoint_seconds": 0.0, "pause": 0.05}
    running = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"),
            *("--nproc-per-node", "2", "-m", "training.child"),
            *(str(tmp_path / "run"), json.dumps(options)),
        ],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    workers = psutil.Process(running.pid).children
    try:
        while int(running.stdout.readline()) < 4:
            pass
        os.kill(workers()[-1].pid, signal.SIGKILL)
        _, said = running.communicate(timeout=180)
    finally:
        # What hangs is ended, workers too, so that nothing stays behind.
        if running.poll() is None:
            for process in [*workers(), running]:
                process.kill()
    assert running.returncode == 0, said
    settings = config(steps=STEPS)
    train(ToyTask, settings, open_run(tmp_path / "one", settings), show_progress=False)
    assert len(losses(tmp_path / "run")) == STEPS
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimiser": {"name": "tiger"}}, "a step of the optimiser tiger needs"),
        ({"inspect_every": 5}, "no layer is inspected"),
        ({"compile": True}, "nothing is compiled"),
        ({"precision": "fp16"}, "fp16"),
        ({"parallel": "tensor"}, "parallel"),
    ],
)
def test_what_cannot_be_divided_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said) as refused:
        small(**{"parallel": "fsdp", **changes})
    assert len(str(refused.value).splitlines()) == 1

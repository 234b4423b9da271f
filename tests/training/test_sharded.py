"""Weights divided over processes (FSDP2): one process's curve, read back by any number of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from normattn.errors import DivergedError, InputError, Interrupted
from normattn.lab.runs import Checkpoints, read_metrics, read_status

from .group import CURVE, FSDP, STEPS, diverge, go, hold, together, without_room
from .settings import small
from .test_distribution import finish, losses, torchrun, workers
from .toy import ToyTask, config


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
    for processes, steps in ((4, 3), (2, 4)):
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


def test_activations_computed_again_change_nothing(alone: Path, tmp_path: Path) -> None:
    together(2, go, tmp_path / "run", {**FSDP, "activation_checkpointing": True})
    assert_like(tmp_path / "run", alone)


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


@pytest.mark.parametrize("size", [2, 4])
def test_each_holds_its_share(size: int) -> None:
    whole, curve = together(size, hold, "ddp")[0]
    shared = together(size, hold, "fsdp")
    # Rows are dealt out by the largest share: vectors of two numbers leave two of four without.
    for held, ours in shared:
        assert held <= 1.15 * whole / size
        assert ours == pytest.approx(curve, rel=1e-6)
    assert whole <= sum(held for held, _ in shared) <= 1.05 * whole


def test_half_precision_is_that_of_one_process(tmp_path: Path) -> None:
    half = {"precision": "bf16"}
    go(0, tmp_path / "one", {**CURVE, **half})
    together(2, go, tmp_path / "two", {**FSDP, **half})
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert two == pytest.approx(one, rel=5e-3)
    assert all(weight.dtype == torch.float32 for weight in weights(tmp_path / "two").values())


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


def test_a_killed_process_is_begun_again_and_the_curve_goes_on(tmp_path: Path) -> None:
    """SIGKILL of one process under torchrun's elastic restart."""
    options: dict[str, object] = {
        "steps": STEPS,
        "parallel": "fsdp",
        "checkpoint_seconds": 0.0,
        "pause": 0.05,
    }
    running = torchrun(tmp_path / "run", options, "--max-restarts", "1")
    assert running.stdout is not None
    while int(running.stdout.readline()) < 8:
        pass
    os.kill(workers(running.pid)[-1], signal.SIGKILL)
    said = finish(running, 180.0)
    assert running.returncode == 0, said
    from normattn.lab.training.loop import train

    from .toy import open_run

    settings = config(steps=STEPS)
    train(ToyTask, settings, open_run(tmp_path / "one", settings), show_progress=False)
    assert len(losses(tmp_path / "run")) == STEPS
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimiser": {"name": "tiger"}}, "a step of the optimiser tiger needs whole matrices"),
        ({"inspect_every": 5}, "no layer is inspected"),
        ({"compile": True}, "nothing is compiled"),
        ({"parallel": "tensor"}, "parallel"),
    ],
)
def test_what_cannot_be_divided_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said) as refused:
        small(**{"parallel": "fsdp", **changes})
    assert len(str(refused.value).splitlines()) == 1

"""Several processes (DDP, FSDP2): one process's curve, read back by any number of them."""

from __future__ import annotations

import json
import os
import resource
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
from normattn.lab.training import TrainingConfig, train_model
from normattn.lab.training.distributed import choose_device
from normattn.lab.training.planning import GPU_MEMORY, describe_plan, make_plan, memory_of
from normattn.models import CausalLM

from .group import (
    CURVE,
    FSDP,
    MODEL,
    STEPS,
    diverge,
    fail_on_main,
    fail_while_others_train,
    go,
    hold,
    together,
    without_room,
)
from .settings import small
from .toy import run


def losses(out: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(out / "metrics.jsonl")]


def test_two_processes_follow_one_and_stop_together(tmp_path: Path) -> None:
    two, one = tmp_path / "two", tmp_path / "one"
    changes = {**CURVE, "accumulate": 2}
    said = together(2, go, two, changes, 5)
    assert [kind for kind, _ in said] == [Interrupted] * 2, said
    status = read_status(two)
    assert status is not None
    assert (status.state, status.step) == ("interrupted", 5)
    together(2, go, two, changes)
    go(0, one, CURVE)
    assert len(losses(two)) == STEPS
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "others"), [(InputError, "InputError"), (KeyboardInterrupt, "RuntimeError")]
)
def test_whatever_fails_on_the_first_process_fails_on_all(
    kind: type[BaseException], others: str
) -> None:
    (own, said), (other, told) = together(2, fail_on_main, kind)
    assert (own, other) == (kind.__name__, others)
    assert "the disk is gone" in said
    assert "the disk is gone" in told


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_what_the_first_process_fails_in_alone_reaches_all(tmp_path: Path, parallel: str) -> None:
    (own, said), (other, told) = together(2, fail_while_others_train, tmp_path / "run", parallel)
    assert (own, other) == ("KeyError", "RuntimeError")
    assert "the disk is gone" in said
    assert "the disk is gone" in told


def test_a_device_that_is_not_there_is_said() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match="CUDA devices"):
        choose_device("cuda:99")
    with pytest.raises(InputError, match="unknown device"):
        choose_device("abacus")


TESTS = Path(__file__).parents[1]


def weights(out: Path) -> dict[str, Tensor]:
    return load_file(out / "model/model.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    go(0, out, CURVE)
    return out


def assert_like(out: Path, alone: Path) -> None:
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


def test_half_precision_is_that_of_one_process_and_goes_on_to_the_bit(tmp_path: Path) -> None:
    """Checkpoints are written while weights already change: what they hold is their own step's."""
    one, broken, whole = (tmp_path / name for name in ("one", "broken", "whole"))
    half: dict[str, Any] = {"precision": "bf16", "keep": [3]}
    sharded = {**FSDP, **half, "activation_checkpointing": True}
    for steps in (4, None):
        together(2, go, broken, {**sharded, "checkpoint_seconds": 0.0}, steps)
    together(2, go, whole, sharded)
    assert read_metrics(broken / "metrics.jsonl") == read_metrics(whole / "metrics.jsonl")
    for model in ("model", "kept/step-00000003"):
        file = f"{model}/model.safetensors"
        assert (broken / file).read_bytes() == (whole / file).read_bytes()
    go(0, one, {**CURVE, **half})
    assert losses(whole) == pytest.approx(losses(one), rel=5e-3)
    assert all(weight.dtype == torch.float32 for weight in weights(whole).values())


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
    run(tmp_path / "one", steps=STEPS)
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


# A training that cannot fit into memory is refused before anything is allocated.
CPU = torch.device("cpu")


def _config(**changes: Any) -> TrainingConfig:
    fields = {
        "steps": 5,
        "batch_size": 4,
        "device": "cpu",
        "model": {"dim": 16, "layers": 2, "train_length": 8, **changes.pop("model", {})},
        "data": {"corpus": "nowhere.txt", "vocab_size": 300, **changes.pop("data", {})},
        "schedule": {"warmup_steps": 1},
    }
    return TrainingConfig.parse({**fields, **changes})


def test_the_estimate_is_what_weights_gradients_moments_and_inputs_of_blocks_take() -> None:
    config = _config()
    numbers = sum(each.numel() for each in CausalLM(config.model).parameters())
    cost = config.cost()
    assert make_plan(config, cost).memory == numbers * 4 * 4 + 4 * 8 * 16 * 2 * 4
    tiger = _config(optimiser={"name": "tiger"}, precision="bf16", accumulate=2)
    assert make_plan(tiger, cost).memory == numbers * 4 * 3 + 2 * 8 * 16 * 2 * 2
    assert make_plan(config, cost, 4).flops * 4 * config.steps == pytest.approx(cost.flops)
    assert make_plan(config, cost, 2).checkpoint == numbers * 4 * 3


def test_the_state_is_what_processes_hold() -> None:
    whole, curve = together(1, hold, "ddp")[0]
    for parallel, size in (("ddp", 2), ("fsdp", 4)):
        settings = small(**CURVE, parallel=parallel)
        plan = make_plan(settings, settings.cost(), size)
        each = together(size, hold, parallel)
        assert all(ours == pytest.approx(curve, rel=1e-6) for _, ours in each)
        held = [held for held, _ in each]
        # Rows are dealt out by the largest share: vectors of two numbers leave two of four without.
        assert whole <= sum(held) <= 1.05 * whole * (size if parallel == "ddp" else 1)
        assert plan.state == pytest.approx(sum(held) / size, rel=0.03)
        # The first process holds most where rows do not divide.
        assert plan.state == pytest.approx(max(held), rel=0.15)


def test_a_plan_says_where_the_memory_is_too_small() -> None:
    large = _config(model={"dim": 8192, "layers": 80})
    cost = large.cost()
    gpu = make_plan(large, cost, 8).memory
    assert gpu > GPU_MEMORY["h100"]
    assert "more than it has" in describe_plan(large, cost, "h100", 1, 8)
    small_cost = _config().cost()
    assert "more than it has" not in describe_plan(_config(), small_cost, "here")
    with pytest.raises(InputError, match="h100"):
        describe_plan(large, cost, "abacus")


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"dim": 1 << 14}, "data": {"vocab_size": 1 << 20}},
        {"model": {"dim": 1 << 10, "train_length": 64}, "batch_size": 10**7},
    ],
    ids=["many words", "many sequences"],
)
def test_a_training_beyond_the_machine_is_refused_before_its_data_is_looked_at(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match=r"at least [\d,.]+ GB .* cpu has [\d,.]+ GB"):
        train_model(_config(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18  # kB


def test_a_limit_of_the_process_counts_as_the_machine_s() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    assert memory_of(CPU) <= psutil.virtual_memory().total
    limit = memory_of(CPU) - (1 << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        assert memory_of(CPU) == limit
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)

"""One step's arithmetic, where it is not finite; stopped anywhere, a run is that never stopped."""

from __future__ import annotations

import json
import math
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import apart
from normattn.errors import DivergedError, InputError
from normattn.lab.runs import RunDirectory, read_metrics, read_status
from normattn.lab.training import LoopConfig, TrainingConfig, train
from normattn.lab.training.distributed import World
from normattn.lab.training.step import TrainStep
from normattn.lab.training.tasks.base import ModelTask
from normattn.models import load_model

from .settings import BAD_STEP, faulty, losses, run, small, state_of, stop

CPU = torch.device("cpu")
DATA = small().prepare()


def made(settings: TrainingConfig) -> ModelTask:
    torch.manual_seed(3)
    return settings.task(DATA, CPU, 1)


def stepper(settings: TrainingConfig) -> TrainStep:
    return TrainStep(made(settings), settings, World(0, 1, CPU), lambda: False)


@pytest.mark.parametrize(
    ("changes", "dtype", "within", "norms_within"),
    [
        ({"accumulate": 4}, torch.float32, 2e-6, 1e-4),
        ({"precision": "bf16"}, torch.bfloat16, 0.02, 0.05),
        ({"precision": "fp16"}, torch.float16, 0.01, 0.02),
    ],
)
def test_steps_are_those_of_fp32_up_to_rounding(
    changes: dict[str, object], dtype: torch.dtype, within: float, norms_within: float
) -> None:
    """Matrices are multiplied in the dtype; weights stay in fp32."""
    taker, seen = stepper(small(**changes)), list[torch.dtype]()
    matrix = taker.task.model.get_submodule("blocks.0.feed_forward.sublayer.up")
    matrix.register_forward_hook(lambda m, i, out: seen.append(out.dtype))
    ours, plain = ([each.step(n) for n in range(1, 9)] for each in (taker, stepper(small())))
    assert set(seen) == {dtype}
    assert {p.dtype for p in taker.task.model.parameters()} == {torch.float32}
    assert [v.loss for v in ours] == pytest.approx([v.loss for v in plain], rel=within)
    norms = [v.gradient_norm for v in plain]
    assert [v.gradient_norm for v in ours] == pytest.approx(norms, rel=norms_within)
    if dtype == torch.float32:
        accuracies = [v.metrics["accuracy"] for v in plain]
        assert [v.metrics["accuracy"] for v in ours] == pytest.approx(accuracies, abs=1e-6)


@pytest.mark.parametrize("clip", [None, 1e-3, 1e3])
def test_clipping_and_update_match_torch(clip: float | None) -> None:
    schedule = {"name": "constant", "warmup_steps": 2}
    steps = {"lr": 0.05, "weight_decay": 0.0, "eps": 1.0}
    settings = small(clip=clip, optimiser=steps, schedule=schedule)
    taker, plain = stepper(settings), made(settings)
    adamw = torch.optim.AdamW(plain.model.parameters(), betas=(0.9, 0.95), eps=1, weight_decay=0)
    for step in (1, 2, 3):
        values = taker.step(step)
        adamw.zero_grad()
        loss, _ = plain.loss(plain.batch(step, 0, 1))
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(plain.model.parameters(), clip or math.inf)
        adamw.param_groups[0]["lr"] = 0.05 * min(1.0, step / 2)
        adamw.step()
        assert values.loss == pytest.approx(loss.item(), rel=1e-6)
        assert values.gradient_norm == pytest.approx(float(norm), rel=1e-5)
        assert values.learning_rate == pytest.approx(0.05 * min(1.0, step / 2))
    ours, theirs = ([*task.model.parameters()] for task in (taker.task, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_step_that_is_not_finite_updates_nothing() -> None:
    taker = stepper(small())
    taker.step(1)
    model = taker.task.model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.get_submodule("final_norm").register_forward_hook(lambda m, i, out: out * float("nan"))
    assert not taker.step(2).finite
    assert model.get_parameter("final_norm.gain").grad is not None
    torch.testing.assert_close(dict(model.named_parameters()), before, rtol=0, atol=0)


def test_a_compiler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match="no-such-compiler"):
        stepper(small(compile=True))


def test_gradients_that_overflow_are_taken_again_with_half_the_scale() -> None:
    taker, plain = stepper(small(precision="fp16")), stepper(small(precision="fp16"))
    taker.scaler.load_state_dict({**taker.scaler.state_dict(), "scale": 2.0**40})
    values, wanted = taker.step(1), plain.step(1)
    assert taker.scaler.get_scale() < 2.0**40
    assert values.finite
    assert values.loss == wanted.loss
    assert values.gradient_norm == pytest.approx(wanted.gradient_norm, rel=5e-3)


# Steps that are not finite.
UP = "blocks.1.feed_forward.sublayer.up"


def diverge(path: Path, fault: str) -> DivergedError:
    with pytest.raises(DivergedError) as caught:
        run(faulty(fault), path)
    return caught.value


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("module", UP),
        ("parameter", f"{UP} (its parameter weight was not finite before this step)"),
        ("loss", "the loss, every module's output being finite"),
        ("gradient", f"the gradient of {UP}.weight"),
    ],
)
def test_step_place_and_checkpoint_are_named(tmp_path: Path, fault: str, where: str) -> None:
    error = diverge(tmp_path, fault)
    assert (error.step, error.where) == (BAD_STEP, where)
    status = read_status(tmp_path)
    assert status is not None
    assert (status.state, status.step, status.where) == ("diverged", BAD_STEP, where)
    assert status.checkpoint == error.checkpoint
    assert where in status.message
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, BAD_STEP))
    last_good = tmp_path / f"checkpoints/step-{BAD_STEP - 1:08d}"
    # Weights that are not finite are no good checkpoint.
    assert error.checkpoint == (None if fault == "parameter" else str(last_good))
    if error.checkpoint is not None:
        kept = RunDirectory.existing(tmp_path).checkpoints.load(BAD_STEP - 1).tensors
        assert kept["model/passes"] == BAD_STEP - 1
    # The same command reports the same without training again.
    assert str(diverge(tmp_path, fault)) == str(error)


def test_a_task_of_ones_own_is_trained(tmp_path: Path) -> None:
    class Doubling:
        model, tokens_per_step = nn.Linear(1, 1), 4

        def batch(self, step: int, shard: int, shards: int) -> Tensor:
            return torch.linspace(-1, 1, 4)[:, None]

        def loss(self, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return (self.model(batch) - 2 * batch).square().mean(), {}

    settings = LoopConfig.parse({"steps": 150, "device": "cpu", "optimiser": {"lr": 0.1}})
    out = RunDirectory.open(tmp_path, settings, "doubling")
    train(lambda world: Doubling(), settings, out, show_progress=False)
    assert losses(tmp_path)[-1] < 0.5 * losses(tmp_path)[0]


# Stopped and resumed.
STEPS = 40
DROPPING: dict[str, Any] = {"steps": STEPS, "model": {"dropout": 0.2}}
CHILD = "import sys; from training.settings import main; sys.exit(main())"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(small(**DROPPING), tmp_path_factory.mktemp("unbroken") / "run").path


def test_a_training_leaves_the_callers_random_numbers_alone(tmp_path: Path, unbroken: Path) -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    run(small(**DROPPING, seed=1), tmp_path / "run")
    assert torch.equal(torch.rand(3), wanted)
    # And its own depend on its seed.
    assert read_metrics(tmp_path / "run/metrics.jsonl") != read_metrics(unbroken / "metrics.jsonl")


def test_fp16_goes_on_with_its_loss_scale(tmp_path: Path) -> None:
    settings = small(**DROPPING, precision="fp16")
    stop(settings, tmp_path / "stopped", 20)
    for name in ("stopped", "unbroken"):
        run(settings, tmp_path / name)
    assert_same(tmp_path / "stopped", tmp_path / "unbroken")
    meta = json.loads((tmp_path / f"stopped/checkpoints/step-{STEPS:08d}/meta.json").read_text())
    assert 0 < meta["meta"]["loss_scale"]["_growth_tracker"] <= STEPS


def assert_same(path: Path, unbroken: Path) -> None:
    assert (path / "metrics.jsonl").read_bytes() == (unbroken / "metrics.jsonl").read_bytes()
    last = f"checkpoints/step-{STEPS:08d}"
    for name in ("tensors.safetensors", "meta.json"):
        assert (path / last / name).read_bytes() == (unbroken / last / name).read_bytes()


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
def test_killed_it_goes_on_to_the_bit(tmp_path: Path, unbroken: Path, kind: signal.Signals) -> None:
    wait_for = random.randint(2, STEPS - 20)
    seconds = 0.02 if kind is signal.SIGKILL else 30.0
    changes = {**DROPPING, "pause": 0.005, "checkpoint_seconds": seconds}
    child = apart.Program(CHILD, tmp_path / "run", json.dumps(changes))
    while child.printed().count("\n") < wait_for:
        assert not child.ended, child.complained()
        time.sleep(0.002)
    child.send(kind)
    ended, (state, step) = child.end(), state_of(tmp_path / "run")
    if kind is signal.SIGKILL:
        assert (ended.code, state) == (-signal.SIGKILL, "running")
    else:
        assert (ended.code, state) == (130, "interrupted")
        assert wait_for <= step < STEPS
        assert kind.name in ended.err
        assert len(ended.err.strip().splitlines()) == 1
    run(small(**DROPPING), tmp_path / "run")
    assert_same(tmp_path / "run", unbroken)
    assert state_of(tmp_path / "run") == ("finished", STEPS)


def test_lines_past_the_checkpoint_and_a_torn_one_are_cut(tmp_path: Path, unbroken: Path) -> None:
    """Whether there is a checkpoint or none yet."""
    for name, torn in (("none", '{"step": 22, "lo'), ("some", '{"step": 22}')):
        out = tmp_path / name
        stop(small(**DROPPING), out, 20)
        with (out / "metrics.jsonl").open("a") as file:
            file.write('{"step": 21, "loss": 9.0}\n' + torn)
        if name == "none":
            shutil.rmtree(out / "checkpoints")
        run(small(**DROPPING), out)
        assert_same(out, unbroken)


def test_another_environment_is_said_in_one_line_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop(small(), tmp_path / "run", 5)
    before = torch.get_num_threads()
    for threads, change in ((2, "threads 1 → 2"), (2, ""), (1, "threads 2 → 1")):
        stop(small(threads=threads), tmp_path / "run", 2)
        said = capsys.readouterr().err
        assert change in said
        assert len(said.splitlines()) == bool(change)
    assert torch.get_num_threads() == before
    stored = json.loads((tmp_path / "run/environment.json").read_text())
    assert [entry["step"] for entry in stored["resumed"]] == [5, 9]
    assert [entry["environment"]["threads"] for entry in stored["resumed"]] == [2, 1]


def test_an_export_that_failed_is_done_by_the_next_run(tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise InputError("no space left")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("normattn.lab.training.tasks.base.save_model", fail)
        with pytest.raises(InputError, match="no space left"):
            run(small(), tmp_path)
    assert state_of(tmp_path)[0] == "running"
    run(small(), tmp_path)
    assert load_model(tmp_path / "model").config == small().model
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == small().steps

"""Stopped anywhere and started again, a run is bit for bit the run that was never stopped."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest
import torch

import apart
from normattn.errors import InputError, Interrupted
from normattn.lab.runs import read_metrics, read_status
from normattn.lab.training.task import TrainingResult

from . import toy
from .toy import ToyTask, config, open_run

DROPOUT = 0.2
STEPS = 60
CHILD = "import sys; from training.child import main; sys.exit(main())"


def run(path: Path, stop_at: int | None = None, **changes: object) -> TrainingResult:
    changed = {"steps": STEPS, **changes}
    return toy.run(path, stop_at, lambda world: ToyTask(world, DROPOUT), **changed)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("unbroken") / "run"
    run(path)
    return path


def test_a_training_leaves_the_callers_random_numbers_alone(tmp_path: Path, unbroken: Path) -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    run(tmp_path / "run", seed=1)
    assert torch.equal(torch.rand(3), wanted)
    # And its own depend on its seed.
    assert read_metrics(tmp_path / "run/metrics.jsonl") != read_metrics(unbroken / "metrics.jsonl")


def test_fp16_goes_on_with_its_loss_scale(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(tmp_path / "stopped", stop_at=20, precision="fp16")
    for name in ("stopped", "unbroken"):
        run(tmp_path / name, precision="fp16")
    assert_same(tmp_path / "stopped", tmp_path / "unbroken")
    meta = json.loads((tmp_path / f"stopped/checkpoints/step-{STEPS:08d}/meta.json").read_text())
    assert 0 < meta["meta"]["loss_scale"]["_growth_tracker"] <= STEPS


def assert_same(path: Path, unbroken: Path) -> None:
    assert (path / "metrics.jsonl").read_bytes() == (unbroken / "metrics.jsonl").read_bytes()
    last = f"checkpoints/step-{STEPS:08d}"
    for name in ("tensors.safetensors", "meta.json"):
        assert (path / last / name).read_bytes() == (unbroken / last / name).read_bytes()


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_goes_on_bit_for_bit(
    tmp_path: Path, unbroken: Path, kind: signal.Signals
) -> None:
    wait_for = random.randint(2, STEPS - 20)
    options: dict[str, object] = {
        "steps": STEPS,
        "dropout": DROPOUT,
        "pause": 0.005,
        "checkpoint_seconds": 0.02 if kind is signal.SIGKILL else 30.0,
    }
    child = apart.Program(CHILD, tmp_path / "run", json.dumps(options))
    while child.printed().count("\n") < wait_for:
        assert not child.ended, child.complained()
        time.sleep(0.002)
    child.send(kind)
    ended = child.end()
    said, status = ended.err, read_status(tmp_path / "run")
    assert status is not None, said
    if kind is signal.SIGKILL:
        assert ended.code == -signal.SIGKILL
        assert status.state == "running"
    else:
        assert ended.code == 130
        assert (status.state, wait_for <= status.step < STEPS) == ("interrupted", True)
        assert kind.name in said
        assert len(said.strip().splitlines()) == 1
    run(tmp_path / "run")
    assert_same(tmp_path / "run", unbroken)
    finished = read_status(tmp_path / "run")
    assert finished is not None
    assert (finished.state, finished.step) == ("finished", STEPS)


def test_lines_past_the_checkpoint_and_a_torn_one_are_cut(tmp_path: Path, unbroken: Path) -> None:
    """Whether there is a checkpoint or none yet."""
    begun = open_run(tmp_path / "none", config(steps=STEPS))
    with begun.lock():
        begun.metrics.append({"step": 1, "loss": 0.0})
        begun.metrics.close()
    with pytest.raises(Interrupted):
        run(tmp_path / "some", stop_at=20)
    with (tmp_path / "some/metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "loss": 9.0}\n{"step": 22, "lo')
    for name in ("none", "some"):
        run(tmp_path / name)
        assert_same(tmp_path / name, unbroken)


def test_another_environment_is_said_in_one_line_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Interrupted):
        run(tmp_path / "run", stop_at=10)
    before = torch.get_num_threads()
    with pytest.raises(Interrupted):
        run(tmp_path / "run", stop_at=2, threads=2)
    assert torch.get_num_threads() == before
    said = capsys.readouterr().err
    assert "threads 1 → 2" in said
    assert len(said.splitlines()) == 1
    stored = json.loads((tmp_path / "run/environment.json").read_text())
    assert [entry["step"] for entry in stored["resumed"]] == [10]


def test_an_export_that_failed_is_done_by_the_next_run(tmp_path: Path) -> None:
    exported: list[object] = []

    def fail(_: object) -> None:
        raise InputError("no space left")

    with pytest.raises(InputError, match="no space left"):
        toy.run(tmp_path, given={"export": fail}, steps=5)
    status = read_status(tmp_path)
    assert status is not None
    assert status.state == "running"
    toy.run(tmp_path, given={"export": exported.append}, steps=5)
    assert len(exported) == 1
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 5

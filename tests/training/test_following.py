"""What follows a training: the progress bar, probes of chosen steps, and trackers."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from normattn.errors import InputError, Interrupted
from normattn.lab.runs import read_metrics
from normattn.lab.training.progress import ProgressBar
from normattn.lab.training.task import Probe, StepReport, Task
from normattn.terminal import Console

from .settings import losses, run, small, stop

REPORT = StepReport(10, 10, 1.23456, 0.5, 1e-3, {}, 640, 4321.0, 1.0)


def drawn(terminal: bool) -> str:
    text = io.StringIO()
    bar = ProgressBar(Console(file=text, force_terminal=terminal, width=120))
    bar.start(0, 10)
    bar.step(REPORT)
    bar.stop()
    return text.getvalue()


def test_a_terminal_sees_loss_rate_and_steps() -> None:
    text = drawn(terminal=True)
    for part in ("1.2346", "4,321 tokens/s", "10/10"):
        assert part in text


def test_a_pipe_gets_a_line_every_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn(terminal=False) == ""
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    text = io.StringIO()
    bar = ProgressBar(Console(file=text, width=20))
    bar.start(1_000, 3_000)
    for step in range(1_001, 1_101):
        clock[0] += 1.0
        bar.step(replace(REPORT, step=step, steps=3_000, seconds=clock[0] - 100))
    bar.stop()
    assert text.getvalue().splitlines() == [
        "step 1,030 of 3,000, loss 1.2346, 4,321 tokens/s, 0:32:50 left",
        "step 1,060 of 3,000, loss 1.2346, 4,321 tokens/s, 0:32:20 left",
        "step 1,090 of 3,000, loss 1.2346, 4,321 tokens/s, 0:31:50 left",
    ]


# Probes.


class Counting:
    name = "looks"

    def due(self, step: int, steps: int) -> bool:
        return step % 4 == 0 or step == steps

    @contextmanager
    def around(self, task: Task, step: int) -> Iterator[Callable[[], Mapping[str, Any]]]:
        calls: list[int] = []
        block, weight = task.model.get_submodule("blocks.0"), next(task.model.parameters())
        handle = block.register_forward_hook(lambda *_: calls.append(step))
        try:
            yield lambda: {"calls": len(calls), "weight": float(weight.detach().sum())}
        finally:
            handle.remove()


def looked(path: Path, after: int | None = None) -> list[dict[str, Any]]:
    settings = small(steps=10, checkpoint_seconds=0.0)
    run(settings, path, after, probes=[Counting()])
    return read_metrics(path / "looks.jsonl")


def test_a_probe_sees_the_step_and_the_model_after_it_stopped_or_not(tmp_path: Path) -> None:
    assert isinstance(Counting(), Probe)
    lines = looked(tmp_path / "whole")
    assert [line["step"] for line in lines] == [4, 8, 10]
    assert {line["calls"] for line in lines} == {1}
    assert len({line["weight"] for line in lines}) == 3
    for after in (5, 8):
        with pytest.raises(Interrupted):
            looked(tmp_path / f"{after}", after)
        assert looked(tmp_path / f"{after}") == lines


# Trackers.

LOGGED = ("loss", "accuracy", "gradient_norm", "learning_rate", "tokens_per_second")
NAMES = {f"train/{name}" for name in LOGGED}
STEPS = small().steps


def tracked(path: Path, first: str, then: str) -> None:
    """A training that is stopped after five steps, and goes on."""
    stop(small(track=first, checkpoint_seconds=1e9), path, 5)
    run(small(track=then, checkpoint_seconds=1e9), path)


class Fake:
    """What trackio and wandb have in common: runs by name, each with rows by step."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.rows: dict[str, list[tuple[int, Mapping[str, float]]]] = {}
        self.finished = 0

    def init(self, **asked: Any) -> Fake:
        print("a tracker that talks on stdout")
        self.asked.append(asked)
        self._rows = self.rows.setdefault(asked["name"], [])
        self._next_step = 1 + max((step for step, _ in self._rows), default=-1)
        return self

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._rows.append((step, values))

    def finish(self) -> None:
        self.finished += 1
        if "mode" not in self.asked[0] and self._rows[-1][0] == 5:
            # As if killed: it goes on at its checkpoint, before the last step that trackio has.
            self.log(dict.fromkeys(NAMES, 0.0), 6)


def installed(monkeypatch: pytest.MonkeyPatch, name: str) -> Fake:
    fake, module = Fake(), ModuleType(name)
    module.__dict__.update(init=fake.init, finish=fake.finish, Settings=SimpleNamespace)
    monkeypatch.setitem(sys.modules, name, module)
    return fake


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_every_step_is_given_once_under_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    fake = installed(monkeypatch, name)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    tracked(tmp_path / "run", name, name)
    assert list(fake.rows) == [json.loads((tmp_path / "run/tracker.json").read_text())["name"]]
    (rows,) = fake.rows.values()
    assert [step for step, _ in rows] == list(range(1, STEPS + 1))
    assert all(set(values) == NAMES for _, values in rows)
    assert fake.finished == 2
    assert fake.asked[0]["config"]["steps"] == STEPS
    assert [each["resume"] for each in fake.asked] == ["allow", "allow"]
    assert next(iter(fake.rows)).startswith(f"{tmp_path.name}-run-")
    # wandb sends nothing unless told.
    assert [each.get("mode") for each in fake.asked] == [{"wandb": "offline"}.get(name)] * 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("method", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_one_line_and_the_training_ends_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    def fails(self: Fake, *given: object, **named: object) -> None:
        raise OSError("no space left\non the device")

    monkeypatch.setattr(Fake, method, fails)
    installed(monkeypatch, "wandb")
    run(small(track="wandb"), tmp_path / "with")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    when = {"init": "after step 0", "log": "at step 1", "finish": "at the end"}[method]
    assert f"wandb failed {when} (no space left on the device)" in line
    run(small(), tmp_path / "without")
    assert losses(tmp_path / "with") == losses(tmp_path / "without")


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module = {"tensorboard": "torch.utils.tensorboard.writer"}.get(name, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf"tracker {name} .*normattn\[track\]"):
        run(small(track=name), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_another_tracker_may_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = {name: installed(monkeypatch, name) for name in ("trackio", "wandb")}
    tracked(tmp_path, "wandb", "trackio")
    steps = {name: [row[0] for row in next(iter(f.rows.values()))] for name, f in fakes.items()}
    assert steps == {"wandb": [1, 2, 3, 4, 5], "trackio": list(range(6, STEPS + 1))}


def test_tensorboard_gets_every_step(tmp_path: Path) -> None:
    module = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = pytest.importorskip(module, reason="needs the extra track")
    tracked(tmp_path, "tensorboard", "tensorboard")
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == NAMES
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, STEPS + 1))
    values = [event.value for event in events.Scalars("train/loss")]
    assert values == pytest.approx(losses(tmp_path))

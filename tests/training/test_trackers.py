"""Trackers: what they are given, how they go on, and that none of them ends a training."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from normattn.errors import InputError, Interrupted
from normattn.lab.runs import RunDirectory
from normattn.lab.training.config import CHANGEABLE, LoopConfig
from normattn.lab.training.loop import train

from .toy import ToyTask, config

NAMES = {
    *("train/loss", "train/accuracy", "train/gradient_norm", "train/learning_rate"),
    "train/tokens_per_second",
}
STEPS = 12


def trained(path: Path, tracker: str | None, until: int = STEPS) -> None:
    """Train with a tracker; up to `until`, where it is stopped by request."""
    settings = config(steps=STEPS, track=tracker, checkpoint_seconds=1e9)
    asked = iter(range(1, STEPS + 2))
    train(
        ToyTask,
        settings,
        RunDirectory.open(path, settings, "toy", changeable=CHANGEABLE),
        show_progress=False,
        should_stop=lambda: next(asked) >= until and until < STEPS,
    )


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


def installed(monkeypatch: pytest.MonkeyPatch, name: str) -> Fake:
    fake, module = Fake(), ModuleType(name)
    module.__dict__.update(
        init=fake.init, finish=fake.finish, Settings=lambda **given: SimpleNamespace(**given)
    )
    monkeypatch.setitem(sys.modules, name, module)
    return fake


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_every_step_is_given_once_under_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    fake = installed(monkeypatch, name)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(Interrupted):
        trained(tmp_path / "run", name, until=5)
    if name == "trackio":
        # A killed run begins again at its checkpoint, before the last step that the tracker has.
        next(iter(fake.rows.values())).append((6, dict.fromkeys(NAMES, 0.0)))
    trained(tmp_path / "run", name)
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


@pytest.mark.parametrize(
    ("method", "when"), [("init", "after step 0"), ("log", "at step 1"), ("finish", "at the end")]
)
def test_a_tracker_that_fails_is_one_line_and_the_training_ends_as_ever(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    method: str,
    when: str,
) -> None:
    def fails(self: Fake, *given: object, **named: object) -> None:
        raise OSError("no space left\non the device")

    monkeypatch.setattr(Fake, method, fails)
    installed(monkeypatch, "wandb")
    trained(tmp_path / "with", "wandb")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert f"wandb failed {when} (no space left on the device)" in line
    trained(tmp_path / "without", None)
    metrics = [(tmp_path / each / "metrics.jsonl").read_bytes() for each in ("with", "without")]
    assert metrics[0] == metrics[1]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module = {"tensorboard": "torch.utils.tensorboard.writer"}.get(name, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf"tracker {name} .*normattn\[track\]"):
        trained(tmp_path / "run", name)
    assert not (tmp_path / "run").exists()


def test_a_run_may_be_resumed_with_another_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is said as in version 0.x among them."""
    fakes = {name: installed(monkeypatch, name) for name in ("trackio", "wandb")}
    with pytest.raises(Interrupted):
        trained(tmp_path, "trackio", until=4)
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["config"]["tensorboard"] = False
    (tmp_path / "config.json").write_text(json.dumps(stored))
    trained(tmp_path, "wandb")
    steps = {name: [row[0] for row in next(iter(f.rows.values()))] for name, f in fakes.items()}
    assert steps == {"trackio": [1, 2, 3, 4], "wandb": list(range(5, STEPS + 1))}
    assert LoopConfig.parse({"tensorboard": True}).track == "tensorboard"
    with pytest.raises(InputError, match="unknown field tensorboard"):
        LoopConfig.parse({"tensorboard": True, "track": "wandb"})


def test_tensorboard_gets_every_step(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs the extra track"
    )
    with pytest.raises(Interrupted):
        trained(tmp_path, "tensorboard", until=5)
    trained(tmp_path, "tensorboard")
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == NAMES
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, STEPS + 1))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(losses)

"""Probes look into chosen steps, and a stopped run leaves the lines of one that never was."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from normattn.errors import InputError, Interrupted
from normattn.lab.runs import read_metrics
from normattn.lab.training.loop import train
from normattn.lab.training.task import Probe, Task

from .toy import ToyTask, config, open_run


class Counting:
    """Counts the forward passes of the step that it looks into."""

    name = "looks"

    def due(self, step: int, steps: int) -> bool:
        return step % 4 == 0 or step == steps

    @contextmanager
    def around(self, task: Task, step: int) -> Iterator[Callable[[], Mapping[str, Any]]]:
        calls: list[int] = []
        handle = task.model.register_forward_hook(lambda *_: calls.append(step))
        try:
            yield lambda: {
                "calls": len(calls),
                "weight": float(next(task.model.parameters()).detach().sum()),
            }
        finally:
            handle.remove()


def run(path: Path, stop: int | None = None) -> list[dict[str, Any]]:
    settings = config(steps=10, checkpoint_seconds=0.0)
    steps = itertools.count(1)
    train(
        ToyTask,
        settings,
        open_run(path, settings),
        probes=[Counting()],
        should_stop=lambda: next(steps) == stop,
        show_progress=False,
    )
    return read_metrics(path / "looks.jsonl")


def test_a_probe_sees_the_step_and_the_model_after_it_stopped_or_not(tmp_path: Path) -> None:
    assert isinstance(Counting(), Probe)
    lines = run(tmp_path / "whole")
    assert [line["step"] for line in lines] == [4, 8, 10]
    assert {line["calls"] for line in lines} == {1}
    assert len({line["weight"] for line in lines}) == 3
    for stop in (5, 8):
        with pytest.raises(Interrupted):
            run(tmp_path / f"{stop}", stop)
        run(tmp_path / f"{stop}")
        whole = (tmp_path / "whole" / "looks.jsonl").read_bytes()
        assert (tmp_path / f"{stop}" / "looks.jsonl").read_bytes() == whole


def test_two_probes_of_one_name_are_refused(tmp_path: Path) -> None:
    settings = config(steps=10)
    with pytest.raises(InputError, match="two probes would write one file"):
        train(ToyTask, settings, open_run(tmp_path, settings), probes=[Counting(), Counting()])

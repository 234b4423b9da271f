"""What a plan measures: a step that takes long is taken once, a quick one until time is up."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from normattn.sweep import language, rates

Working = Callable[[float, float], tuple[list[int], Callable[[int], None]]]


@pytest.fixture
def working(monkeypatch: pytest.MonkeyPatch) -> Working:
    """Work of so many seconds by a clock that nothing else moves, and what it was called with."""
    clock = SimpleNamespace(now=0.0)
    for module in (language, rates):
        monkeypatch.setattr(module.time, "perf_counter", lambda: clock.now)

    def of(first: float, others: float) -> tuple[list[int], Callable[..., None]]:
        calls: list[int] = []

        def work(number: int) -> None:
            clock.now += others if calls else first
            calls.append(number)

        return calls, work

    return of


def test_a_step_beyond_the_measurements_time_is_taken_once(working: Working) -> None:
    calls, step = working(60.0, 60.0)
    assert rates._per_step(step, 3000) == 60.0
    assert calls == [1]


def test_the_first_of_quick_steps_is_not_counted(working: Working) -> None:
    calls, step = working(1.0, 0.25)
    assert rates._per_step(step, 3000) == 0.25
    assert calls == [1, 2, 3, 4, 5, 6, 7]


def test_no_more_steps_are_timed_than_the_training_has(working: Working) -> None:
    calls, step = working(0.5, 0.25)
    rates._per_step(step, 3)
    assert calls == [1, 2, 3]


def test_a_row_beyond_the_measurements_time_is_read_once(working: Working) -> None:
    calls, work = working(60.0, 60.0)
    assert language._per_row(work, 32) == 60.0
    assert calls == [1]

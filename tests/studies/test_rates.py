"""What a plan measures: a step that takes long is taken once, a quick one until time is up."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from normattn.lab.studies import keynorm, qknorm, realformer, rmsnorm
from normattn.lab.sweep import language, rates
from normattn.lab.sweep.plan import Rates
from normattn.lab.sweep.run import fp32_advice
from normattn.lab.sweep.study import Request

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


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_training_under_bf16_is_timed_in_fp32_too(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = Request(
        preset="smoke", changes={"training.precision": precision, "training.device": "cpu"}
    )
    cell = keynorm.STUDY.resolve(resolved).cells[0]
    scored = Mock(return_value=1e-6)
    monkeypatch.setattr(language.CausalCell, "score_seconds", scored)
    timed = rates.rates(cell)
    scored.assert_called_once_with()  # It is the same in both.
    expected = {"train", "score", "fp32"} if precision == "bf16" else {"train", "score"}
    assert timed.keys() == expected
    assert all(seconds > 0 for seconds in timed.values())


def test_every_kind_of_cell_is_timed_in_fp32() -> None:
    for study in (keynorm.STUDY, realformer.STUDY, rmsnorm.STUDY, qknorm.STUDY):
        changes = {"training.precision": "bf16", "training.device": "cpu"}
        cells = study.resolve(Request(preset="smoke", changes=changes)).cells
        asked = [cell for cell in cells if cell.training_config.precision == "bf16"]
        assert asked
        for cell in asked:
            in_fp32 = rates._in_fp32(cell)
            assert in_fp32 is not None
            assert in_fp32.training_config.precision == "fp32"


@pytest.mark.parametrize(("bf16", "fp32"), [(2.0, None), (2.0, 2.0), (1.0, 2.0)])
def test_fp32_is_not_advised_where_it_is_not_faster(bf16: float, fp32: float | None) -> None:
    assert fp32_advice(Rates(bf16, 1.0, 1.0, 1, fp32)) is None


def test_fp32_is_advised_where_it_is_faster() -> None:
    advice = fp32_advice(Rates(2e-3, 1.0, 1.0, 1, 1e-3))
    assert advice is not None
    assert "fp32 is 2.0 times as fast as bf16 on this processor" in advice
    assert "1,000 trained tokens/s in each job with --set training.precision=fp32" in advice

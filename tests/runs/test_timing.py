"""Interleaving, medians and ratios against timings made by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normattn.lab.runs.timing import Timing, interleave, ratio

SECONDS = st.floats(1e-6, 1e3)


def test_median_and_spread() -> None:
    timing = Timing((3.0, 1.0, 2.0))
    assert (timing.median, timing.low, timing.high) == (2.0, 1.0, 3.0)
    assert timing.summary()["rounds"] == [3.0, 1.0, 2.0]


def test_ratio_of_medians() -> None:
    found = ratio([2.0, 4.0, 6.0], [1.0, 2.0, 100.0])
    assert found.value == 2.0
    assert found.low <= found.value <= found.high


def test_paired_rounds_cancel_the_drift_of_the_machine() -> None:
    drift = [1.0, 5.0, 2.0, 9.0, 3.0, 4.0, 8.0, 6.0, 7.0]
    found = ratio([1.5 * x for x in drift], drift)
    assert found.low == pytest.approx(1.5)
    assert found.high == pytest.approx(1.5)


def test_one_value_has_no_interval() -> None:
    assert ratio([3.0], [2.0]).low == ratio([3.0], [2.0]).high == 1.5


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=2, max_size=20))
def test_interval_lies_within_the_extremes(pairs: list[tuple[float, float]]) -> None:
    ours, peer = zip(*pairs, strict=True)
    found = ratio(ours, peer)
    least, most = min(ours) / max(peer), max(ours) / min(peer)
    for value in (found.value, found.low, found.high):
        assert least * (1 - 1e-9) <= value <= most * (1 + 1e-9)


def test_every_entry_runs_once_a_round_in_changing_order() -> None:
    said: list[str] = []
    entries = {name: (lambda name=name: said.append(name)) for name in "abc"}
    rounds: list[int] = []
    timings = interleave(entries, 5, warm=2, least_seconds=0.0, on_round=rounds.append)
    assert rounds == [1, 2, 3, 4, 5]
    assert said[:6] == ["a", "a", "b", "b", "c", "c"]
    turns = [tuple(said[i : i + 3]) for i in range(6, len(said), 3)]
    assert len(turns) == 5
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len(set(turns)) > 1
    assert all(len(timing.rounds) == 5 and timing.calls == 1 for timing in timings.values())


def test_quick_entries_are_called_many_times_a_sample() -> None:
    calls: list[int] = []
    timing = interleave({"a": lambda: calls.append(1)}, 2, warm=1, least_seconds=1e-3)["a"]
    assert timing.calls > 1
    assert len(calls) == 1 + 2 * timing.calls

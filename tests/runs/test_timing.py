"""Interleaving, medians and ratios against timings made by hand."""

from __future__ import annotations

from normattn.lab.runs.timing import Timing, interleave


def test_median_and_spread() -> None:
    timing = Timing((3.0, 1.0, 2.0))
    assert timing.median == 2.0


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

"""Interleaved timing: every entry once per round, medians over rounds, ratios within one run.

A machine's speed drifts; entries that are timed in turn drift together, so their ratio does not.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Step = Callable[[], object]

# One timed sample lasts at least this long, so that the clock and the loop around it vanish.
LEAST_SECONDS = 0.02


@dataclass(frozen=True)
class Timing:
    """Seconds per call in every round; a round's sample is the mean of `calls` calls."""

    rounds: tuple[float, ...]
    calls: int = 1

    @property
    def median(self) -> float:
        """The middle round."""
        return statistics.median(self.rounds)


def interleave(
    entries: Mapping[str, Step],
    rounds: int,
    warm: int = 2,
    device: str = "cpu",
    least_seconds: float = LEAST_SECONDS,
    on_round: Callable[[int], None] = lambda done: None,
) -> dict[str, Timing]:
    """Time each entry once per round, after `warm` (at least 1) untimed calls of each.

    An entry quicker than `least_seconds` is called several times a sample. Every round has an
    order of its own, the same in every run; `on_round` is told how many rounds are done.
    """
    calls = {}
    for name, step in entries.items():
        quickest = min(_seconds(step, 1, device) for _ in range(max(1, warm)))
        calls[name] = max(1, round(least_seconds / max(quickest, 1e-7)))
    seconds: dict[str, list[float]] = {name: [] for name in entries}
    shuffle, order = random.Random(0), list(entries)
    for done in range(1, rounds + 1):
        # Another order each round, so that no entry always follows the same one.
        shuffle.shuffle(order)
        for name in order:
            seconds[name].append(_seconds(entries[name], calls[name], device))
        on_round(done)
    return {name: Timing(tuple(taken), calls[name]) for name, taken in seconds.items()}


def _seconds(step: Step, calls: int, device: str) -> float:
    """Seconds per call; on a GPU until the device has finished.

    One thread on a CPU is measured by its own CPU time: load from other processes does not count.
    """
    alone = device == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter
    _synchronise(device)
    start = clock()
    for _ in range(calls):
        step()
    _synchronise(device)
    return (clock() - start) / calls


def _synchronise(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)

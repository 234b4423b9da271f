"""Interleaved timing: every function once per round, medians over rounds.

A machine's speed drifts, but not the ratio of functions that are timed in turn.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

Step = Callable[[], object]
MIN_SECONDS = 0.02
"""A sample takes at least this long, so that the overhead of the clock is negligible."""


@dataclass(frozen=True)
class Timing:
    """Seconds per call in every round; a round's sample is the mean of `calls` calls."""

    rounds: tuple[float, ...]
    calls: int = 1

    @property
    def median(self) -> float:
        """The median over rounds."""
        return statistics.median(self.rounds)


def interleave(
    entries: Mapping[str, Step],
    rounds: int,
    warm: int = 2,
    device: str = "cpu",
    min_seconds: float = MIN_SECONDS,
    on_round: Callable[[int], None] = lambda done: None,
) -> dict[str, Timing]:
    """Time each entry once per round, after `warm` (at least 1) untimed calls of each.

    An entry faster than `min_seconds` is called several times a sample. Every round has another
    order, the same in every run. `on_round` is called with the number of rounds done.
    """
    calls = {}
    for name, step in entries.items():
        fastest = min(_seconds(step, 1, device) for _ in range(max(1, warm)))
        calls[name] = max(1, round(min_seconds / max(fastest, 1e-7)))
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
    """Return the seconds per call until the device is done: CPU time if it has one thread."""
    on_cpu = device == "cpu"
    clock = time.thread_time if on_cpu and torch.get_num_threads() == 1 else time.perf_counter
    synchronise: Step = (lambda: None) if on_cpu else partial(torch.cuda.synchronize, device)
    synchronise()
    start = clock()
    for _ in range(calls):
        step()
    synchronise()
    return (clock() - start) / calls

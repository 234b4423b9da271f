"""Interleaved timing: every entry once per round, so that a drifting machine changes no ratio."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping

import torch


def interleave(
    entries: Mapping[str, Callable[[], object]],
    rounds: int,
    warm: int = 2,
    device: str = "cpu",
    on_round: Callable[[int], None] = lambda done: None,
) -> dict[str, list[float]]:
    """The seconds of each entry in every round, after `warm` (at least 1) untimed calls of each.

    Every round has an order of its own, the same in every run, so that no entry always follows the
    same one; `on_round` gets the number of rounds done. One thread on a CPU is measured by its
    own CPU time: load from other processes does not count. On a GPU a call ends when the device
    has finished.
    """
    alone = device == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter

    def synchronise() -> None:
        if device != "cpu":
            torch.cuda.synchronize(device)

    for step in entries.values():
        for _ in range(max(1, warm)):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in entries}
    shuffle, order = random.Random(0), list(entries)
    for done in range(1, rounds + 1):
        shuffle.shuffle(order)
        for name in order:
            synchronise()
            start = clock()
            entries[name]()
            synchronise()
            seconds[name].append(clock() - start)
        on_round(done)
    return seconds

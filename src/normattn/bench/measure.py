"""One case measured: its entries and the machine's own peaks interleaved, memory apart."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from normattn.bench.case import Case, Entry
from normattn.bench.machine import Machine
from normattn.bench.memory import peak_memory
from normattn.bench.settings import Settings
from normattn.bench.timing import Timing, interleave

WARM = 2
_MEMORY_RUNS = 3


@dataclass(frozen=True)
class Measurement:
    """Seconds per call by round, MiB by run, and the rates of the machine beside them."""

    seconds: dict[str, Timing]
    memory: dict[str, tuple[float, ...]]
    probes: dict[str, float]

    def values(self, name: str, of: str) -> tuple[float, ...]:
        """The rounds of an entry's time, or the runs of its memory."""
        return self.seconds[name].rounds if of == "time" else self.memory[name]

    def summary(self) -> dict[str, Any]:
        """The measurement as JSON values."""
        return {
            "seconds": {name: timing.summary() for name, timing in self.seconds.items()},
            "memory_mib": {name: list(values) for name, values in self.memory.items()},
            "machine": self.probes,
        }

    @staticmethod
    def read(stored: dict[str, Any]) -> Measurement:
        """The measurement that `summary` stored."""
        seconds = {
            name: Timing(tuple(map(float, timing["rounds"])), int(timing["calls"]))
            for name, timing in stored["seconds"].items()
        }
        memory = {name: tuple(map(float, runs)) for name, runs in stored["memory_mib"].items()}
        return Measurement(seconds, memory, dict(stored["machine"]))


def measure(
    case: Case, settings: Settings, on_round: Callable[[int], None] = lambda done: None
) -> Measurement:
    """Time what the goals of `case` ask for, and weigh it, in `settings.threads` threads."""
    with _threads(settings.threads):
        seconds, probes = _time(case, settings, on_round)
    memory = {name: _weigh(entry, settings) for name, entry in case.weighed.items()}
    return Measurement(seconds, memory, probes)


def _time(
    case: Case, settings: Settings, on_round: Callable[[int], None]
) -> tuple[dict[str, Timing], dict[str, float]]:
    if not case.timed:
        return {}, {}
    steps = {name: entry.build() for name, entry in case.timed.items()}
    machine = Machine(case.dtype, settings.device, settings.quick)
    timings = interleave(
        {**steps, **machine.entries()},
        settings.rounds,
        warm=1 if settings.quick else WARM,
        device=settings.device,
        **({"least_seconds": 0.0} if settings.quick else {}),
        on_round=on_round,
    )
    del steps
    gc.collect()
    return {name: timings[name] for name in case.timed}, machine.reached(timings).summary()


def _weigh(entry: Entry, settings: Settings) -> tuple[float, ...]:
    """MiB of as many processes; two pages at least, so that a ratio of tiny peaks exists."""
    runs = 1 if settings.quick else _MEMORY_RUNS
    small = entry.small().build
    return tuple(
        max(2**-7, peak_memory(entry.build, settings.threads, small, settings.device))
        for _ in range(runs)
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""One case measured: its entries and the machine's own peaks interleaved, memory apart."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from normattn.bench.case import Case, Entry
from normattn.bench.machine import Machine
from normattn.bench.memory import peak_memory
from normattn.bench.settings import Settings
from normattn.lab.runs.timing import Timing, interleave, threads

WARM = 2
_MEMORY_RUNS = 2


@dataclass(frozen=True)
class Measurement:
    """Seconds per call by round, MiB by run, and the rates of the machine beside them."""

    seconds: dict[str, Timing]
    memory: dict[str, tuple[float, ...]]
    first_memory: dict[str, tuple[float, ...]]
    probes: dict[str, float]

    def values(self, name: str, of: str) -> tuple[float, ...]:
        """The rounds of an entry's time, or the runs of its memory."""
        if of == "time":
            return self.seconds[name].rounds
        return (self.memory if of == "memory" else self.first_memory)[name]

    def summary(self) -> dict[str, Any]:
        """The measurement as JSON values."""
        return {
            "seconds": {name: timing.summary() for name, timing in self.seconds.items()},
            "memory_mib": _lists(self.memory),
            "first_memory_mib": _lists(self.first_memory),
            "machine": self.probes,
        }

    @staticmethod
    def read(stored: dict[str, Any]) -> Measurement:
        """The measurement that `summary` stored."""
        seconds = {
            name: Timing(tuple(map(float, timing["rounds"])), int(timing["calls"]))
            for name, timing in stored["seconds"].items()
        }
        memory, first = (
            {name: tuple(map(float, runs)) for name, runs in stored[key].items()}
            for key in ("memory_mib", "first_memory_mib")
        )
        return Measurement(seconds, memory, first, dict(stored["machine"]))


def measure(
    case: Case, settings: Settings, on_round: Callable[[int], None] = lambda done: None
) -> Measurement:
    """Time what the goals of `case` ask for, and weigh it, in `settings.threads` threads."""
    with threads(settings.threads):
        seconds, probes = _time(case, settings, on_round)
    memory = {name: _weigh(entry, entry, settings) for name, entry in case.asked("memory").items()}
    first = {
        name: _weigh(entry, entry.small(), settings)
        for name, entry in case.asked("first memory").items()
    }
    return Measurement(seconds, memory, first, probes)


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


def _weigh(entry: Entry, warm: Entry, settings: Settings) -> tuple[float, ...]:
    """MiB of as many processes; two pages at least, so that a ratio of tiny peaks exists."""
    runs = 1 if settings.quick else _MEMORY_RUNS
    return tuple(
        max(2**-7, peak_memory(entry.build, settings.threads, warm.build, settings.device))
        for _ in range(runs)
    )


def _lists(values: dict[str, tuple[float, ...]]) -> dict[str, list[float]]:
    return {name: list(runs) for name, runs in values.items()}

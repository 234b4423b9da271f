"""Cases timed in interleaved rounds, a record with the machine and versions, one Markdown table."""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from normattn.lab.runs.environment import describe_environment, torch_threads
from normattn.lab.runs.timing import MIN_SECONDS, Step, Timing, interleave

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_RESAMPLES, _LEVEL = 2000, 0.95
PEERS = ("transformers", "x-transformers")


@dataclass(frozen=True)
class Options:
    """The options of the command line; `quick` runs small sizes, to test the code path."""

    device: str = "cpu"
    rounds: int = 9
    threads: int = 1
    lengths: tuple[int, ...] = (4096,)
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    quick: bool = False


@dataclass(frozen=True)
class Case:
    """Entries that are timed together; all ratios are to the entry named `peer`.

    Building an entry creates its tensors or model, and returns the step that is timed.
    """

    name: str
    entries: Mapping[str, Callable[[], Step]]
    peer: str


@dataclass(frozen=True)
class Result:
    """The seconds of every entry of a case, round by round."""

    case: str
    peer: str
    seconds: Mapping[str, Timing]

    def rows(self) -> Iterable[tuple[str, str, str, str]]:
        """A table row for each entry: milliseconds with their spread, and the ratio to the peer."""
        for name, timing in self.seconds.items():
            quickest, slowest = min(timing.rounds), max(timing.rounds)
            low, middle, high = (1e3 * s for s in (quickest, timing.median, slowest))
            compared = "1"
            if name != self.peer:
                relative = ratio(timing.rounds, self.seconds[self.peer].rounds)
                compared = f"{relative.value:.2f} [{relative.low:.2f}, {relative.high:.2f}]"
            yield self.case, name, f"{middle:.3f} ({low:.3f} to {high:.3f})", compared


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians and its 95 % bootstrap interval (the value itself where none exists)."""

    value: float
    low: float
    high: float


def ratio(ours: Sequence[float], peer: Sequence[float]) -> Ratio:
    """median(ours) / median(peer).

    Where both have the same number of values (≥ 2), values of one round belong together and rounds
    are resampled as pairs: the interval lies between the 2.5th and the 97.5th percentile.
    """
    value = statistics.median(ours) / statistics.median(peer)
    if len(ours) != len(peer) or len(ours) < 2:
        return Ratio(value, value, value)
    drawn = np.random.default_rng(0).integers(len(ours), size=(_RESAMPLES, len(ours)))
    above, below = (np.median(np.asarray(x)[drawn], axis=1) for x in (ours, peer))
    tail = 50 * (1 - _LEVEL)
    low, high = np.percentile(above / below, [tail, 100 - tail])
    return Ratio(value, float(low), float(high))


def _summary(timing: Timing) -> dict[str, Any]:
    return {
        "median": timing.median,
        "low": min(timing.rounds),
        "high": max(timing.rounds),
        "calls": timing.calls,
        "rounds": list(timing.rounds),
    }


def measure(case: Case, options: Options) -> Result:
    """Time the entries of a case in turn, in `options.rounds` rounds."""
    with torch_threads(options.threads):
        steps = {name: build() for name, build in case.entries.items()}
        timings = interleave(
            steps,
            1 if options.quick else options.rounds,
            warm=1 if options.quick else 2,
            device=options.device,
            min_seconds=0.0 if options.quick else MIN_SECONDS,
        )
    del steps
    gc.collect()
    return Result(case.name, case.peer, timings)


def machine(options: Options) -> dict[str, Any]:
    """Facts that affect the numbers: processor or GPU, threads, versions, date."""
    versions = {}
    for package in PEERS:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    facts = {**describe_environment(), **versions, "threads": options.threads}
    if options.device != "cpu":
        facts["gpu"] = torch.cuda.get_device_name(options.device)
    return {**facts, "date": datetime.date.today().isoformat()}


def write_record(results: Iterable[Result], options: Options, out: Path) -> str:
    """Write `out`/benchmarks.json and `out`/benchmarks.md; return the table."""
    measured, facts = list(results), machine(options)
    record = {
        "machine": facts,
        "results": [
            {
                "case": result.case,
                "peer": result.peer,
                "seconds": {name: _summary(timing) for name, timing in result.seconds.items()},
            }
            for result in measured
        ],
    }
    table = markdown(measured, facts)
    out.mkdir(parents=True, exist_ok=True)
    (out / "benchmarks.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (out / "benchmarks.md").write_text(table, encoding="utf-8")
    return table


def markdown(results: Iterable[Result], facts: Mapping[str, Any]) -> str:
    """One table of all cases, after a line on the machine."""
    environment = ", ".join(f"{name} {value}" for name, value in facts.items())
    head = ("case", "entry", "ms: median (least to most)", "ratio to peer [95 % interval]")
    rows = [head, ("---", "---", "---:", "---:")]
    rows += [row for result in results for row in result.rows()]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"Medians of interleaved rounds. {environment}.", "", *lines]) + "\n"

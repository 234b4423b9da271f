"""A campaign of faults: its parts are found by name, each counts promises kept and broken."""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
import random
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHOWN_FAILURES = 20


@dataclass
class Count:
    """How often one promise was tried, and what was found where it did not hold."""

    promise: str
    trials: int = 0
    failures: list[str] = field(default_factory=list)

    def passed(self) -> None:
        """One more trial, and the promise held."""
        self.trials += 1

    def failed(self, found: str) -> None:
        """One more trial, and the promise did not hold."""
        self.trials += 1
        self.failures.append(found)

    def check(self, held: bool, found: str) -> None:
        """One more trial; `found` says what was seen where it did not hold."""
        if held:
            self.passed()
        else:
            self.failed(found)


@dataclass(frozen=True)
class Campaign:
    """What a part gets: an empty folder of its own, a seed, and how much is asked of it.

    A part asks `has_time` before each trial and counts what it did; `until` is of
    `time.monotonic`.
    """

    folder: Path
    seed: int
    full: bool
    until: float = math.inf

    @property
    def has_time(self) -> bool:
        """Whether there is time for another trial."""
        return time.monotonic() < self.until

    @property
    def random(self) -> random.Random:
        """A generator that begins at the seed."""
        return random.Random(self.seed)


@dataclass(frozen=True)
class Result:
    """The counts of one part, and the seconds it took."""

    part: str
    counts: tuple[Count, ...]
    seconds: float


def part_names(full: bool = True) -> list[str]:
    """The modules of `faults.parts`, in order; without those of a whole campaign alone.

    Such a part says `FULL_ONLY = True`: its smallest trial takes too long for the tests.
    """
    package = importlib.import_module("faults.parts")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return [name for name in names if full or not _is_full_only(name)]


def _is_full_only(name: str) -> bool:
    return bool(getattr(importlib.import_module(f"faults.parts.{name}"), "FULL_ONLY", False))


def run_part(name: str, folder: Path, seed: int, full: bool, seconds: float = math.inf) -> Result:
    """Run `faults.parts.NAME.run` in an empty folder and take its counts, made in `seconds`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    module: Any = importlib.import_module(f"faults.parts.{name}")
    before = time.monotonic()
    counts: Iterable[Count] = module.run(Campaign(folder, seed, full, before + seconds))
    return Result(name, tuple(counts), time.monotonic() - before)


def read_record(out: Path) -> dict[str, Result]:
    """The results on record, by part: those of parts that are not run again are kept."""
    file = out / "faults.json"
    if not file.exists():
        return {}
    return {
        each["part"]: Result(
            each["part"],
            tuple(Count(one["promise"], one["trials"], one["found"]) for one in each["promises"]),
            each["seconds"],
        )
        for each in json.loads(file.read_text())["parts"]
    }


def write_record(results: Sequence[Result], seed: int, full: bool, out: Path) -> None:
    """Write `out`/faults.json and `out`/README.md: every promise, its trials and its failures."""
    out.mkdir(parents=True, exist_ok=True)
    record = {
        "seed": seed,
        "full": full,
        "parts": [
            {
                "part": each.part,
                "seconds": round(each.seconds, 1),
                "promises": [
                    {
                        "promise": count.promise,
                        "trials": count.trials,
                        "failures": len(count.failures),
                        "found": count.failures,
                    }
                    for count in each.counts
                ],
            }
            for each in results
        ],
    }
    (out / "faults.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    (out / "README.md").write_text(_page(results, seed, full))


def _page(results: Sequence[Result], seed: int, full: bool) -> str:
    trials = sum(count.trials for each in results for count in each.counts)
    failures = sum(len(count.failures) for each in results for count in each.counts)
    command = f"scripts/faults{'' if full else ' --small'} --seed {seed}"
    lines = [
        "# Faults",
        "",
        f"`{command}`: {trials:,} trials, {failures:,} failures.",
        "",
        "| part | promise | trials | failures |",
        "| --- | --- | ---: | ---: |",
    ]
    lines += [
        f"| {each.part} | {count.promise} | {count.trials:,} | {len(count.failures):,} |"
        for each in results
        for count in each.counts
    ]
    found = [f"- {count.promise}: {one}" for each in results for count in each.counts
             for one in count.failures[:SHOWN_FAILURES]]  # fmt: skip
    if found:
        lines += ["", "What was found:", "", *found]
    return "\n".join(lines) + "\n"

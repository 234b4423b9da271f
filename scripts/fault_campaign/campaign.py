"""A campaign of faults: its parts are found by name, each counts promises kept and broken."""

from __future__ import annotations

import datetime
import importlib
import json
import math
import os
import pkgutil
import random
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normattn.io import write_json, write_text
from normattn.lab.runs.environment import describe_environment

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
    """The counts of one part, the seconds it took, and where, when and of what it was made.

    `made` holds seed, full (all trials, or as few as the tests make), within (the seconds it was
    given, if not as many as it takes), date, commit and machine.
    """

    part: str
    counts: tuple[Count, ...]
    seconds: float
    made: dict[str, Any]


def part_names(full: bool = True) -> list[str]:
    """The modules of `fault_campaign.parts`, in order; without those of a whole campaign alone.

    Such a part says `FULL_ONLY = True`: its smallest trial takes too long for the tests.
    """
    package = importlib.import_module("fault_campaign.parts")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return [name for name in names if full or not _is_full_only(name)]


def _is_full_only(name: str) -> bool:
    module = importlib.import_module(f"fault_campaign.parts.{name}")
    return bool(getattr(module, "FULL_ONLY", False))


def run_part(name: str, folder: Path, seed: int, full: bool, seconds: float = math.inf) -> Result:
    """Run the part in an empty folder and take its counts, made in `seconds`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    module: Any = importlib.import_module(f"fault_campaign.parts.{name}")
    most = seconds if math.isfinite(seconds) else None
    made = {"seed": seed, "full": full, "within": most, "date": _today(), "commit": _commit()}
    before = time.monotonic()
    counts: Iterable[Count] = module.run(Campaign(folder, seed, full, before + seconds))
    counts = tuple(
        Count(each.promise, each.trials, [one.replace(str(folder), "…") for one in each.failures])
        for each in counts
    )
    # Asked for at the end: nothing may start threads before a part forks.
    machine = {**describe_environment(), "cores": os.cpu_count()}
    return Result(name, counts, time.monotonic() - before, {**made, "machine": machine})


def _today() -> str:
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


def _commit() -> str:
    """The commit of the source, and whether it had changes; "unknown" outside a repository."""
    root = Path(__file__).parent
    asked = (["git", "rev-parse", "--short", "HEAD"], ["git", "status", "--porcelain", "-uno"])
    said = [subprocess.run(a, cwd=root, capture_output=True, text=True, check=False) for a in asked]
    if any(each.returncode for each in said):
        return "unknown"
    return said[0].stdout.strip() + (" with changes" if said[1].stdout.strip() else "")


def read_record(out: Path) -> dict[str, Result]:
    """The results on record, by part."""
    found = {}
    for file in sorted(out.glob("*.json")):
        one = json.loads(file.read_text())
        counts = tuple(
            Count(each["promise"], each["trials"], each["found"]) for each in one["promises"]
        )
        found[one["part"]] = Result(one["part"], counts, one["seconds"], one["made"])
    return found


def write_record(result: Result, out: Path) -> None:
    """Write `out`/PART.json, and `out`/README.md of all parts on record.

    A file for each part, so that parts can be run apart, in any order, and again.
    """
    promises = [
        {
            "promise": count.promise,
            "trials": count.trials,
            "failures": len(count.failures),
            "found": count.failures,
        }
        for count in result.counts
    ]
    record = {
        "part": result.part,
        "made": result.made,
        "seconds": round(result.seconds, 1),
        "promises": promises,
    }
    write_json(out / f"{result.part}.json", record)
    write_text(out / "README.md", _page(list(read_record(out).values())))


def _page(results: Sequence[Result]) -> str:
    every = [(each.part, count) for each in results for count in each.counts]
    trials = sum(count.trials for _, count in every)
    failures = sum(len(count.failures) for _, count in every)
    lines = [
        "# Does normattn survive interrupts, damaged files and full disks?",
        "",
        f"`scripts/faults` tested each promise below: {trials:,} trials, {failures:,} failures.",
        "",
        "| part | promise | trials | failures |",
        "| --- | --- | ---: | ---: |",
        *(f"| {part} | {one.promise} | {one.trials:,} | {len(one.failures):,} |"
          for part, one in every),
        "",
        "| part | command | seconds | date | commit |",
        "| --- | --- | ---: | --- | --- |",
        *(f"| {each.part} | `{_command(each)}` | {each.seconds:,.0f} | {each.made['date']} "
          f"| {each.made['commit']} |" for each in results),
        "",
        *(f"Made on {one}." for one in sorted({_machine(each) for each in results})),
    ]  # fmt: skip
    missing = sorted({*part_names()} - {each.part for each in results})
    if missing:
        lines += ["", f"Not on record: {', '.join(missing)}."]
    found = [f"- {part}, {one.promise}: {each}" for part, one in every
             for each in one.failures[:SHOWN_FAILURES]]  # fmt: skip
    if found:
        lines += ["", "What was found:", "", *found]
    return "\n".join(lines) + "\n"


def _command(result: Result) -> str:
    small = "" if result.made["full"] else " --small"
    most = result.made["within"]
    limit = f" --seconds {most:g}" if most is not None else ""
    return f"scripts/faults {result.part}{small} --seed {result.made['seed']}{limit}"


def _machine(result: Result) -> str:
    machine = dict(result.made["machine"])
    platform, cpu, cores = (machine.pop(name) for name in ("platform", "cpu", "cores"))
    versions = ", ".join(f"{name} {value}" for name, value in machine.items())
    return f"{platform}, {cpu}, {cores} cores: {versions}"

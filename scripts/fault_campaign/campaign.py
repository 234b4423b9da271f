"""Run parts of the fault campaign, and record how many trials of each promise failed."""

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
    """The trials of one promise, and a description of each failure."""

    promise: str
    trials: int = 0
    failures: list[str] = field(default_factory=list)

    def passed(self) -> None:
        """Count a trial that passed."""
        self.trials += 1

    def failed(self, found: str) -> None:
        """Count a trial that failed."""
        self.trials += 1
        self.failures.append(found)

    def check(self, held: bool, found: str) -> None:
        """Count a trial; `found` describes its failure."""
        if held:
            self.passed()
        else:
            self.failed(found)


@dataclass(frozen=True)
class Campaign:
    """The input of a part: an empty folder, a seed, and whether to run all trials.

    A part checks `has_time` before each trial; `until` is a time of `time.monotonic`.
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
        """A new generator with this seed."""
        return random.Random(self.seed)


@dataclass(frozen=True)
class Result:
    """The counts and the seconds of one part, and how it was run.

    `made` holds seed, full (all trials, or the few that the tests run), within (the time limit in
    seconds, or None), date, commit and machine.
    """

    part: str
    counts: tuple[Count, ...]
    seconds: float
    made: dict[str, Any]


def part_names(full: bool = True) -> list[str]:
    """The modules of `fault_campaign.parts`, in order; unless `full`, without `FULL_ONLY` ones.

    The smallest trial of such a part takes too long for the tests.
    """
    package = importlib.import_module("fault_campaign.parts")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return [name for name in names if full or not _is_full_only(name)]


def _is_full_only(name: str) -> bool:
    module = importlib.import_module(f"fault_campaign.parts.{name}")
    return bool(getattr(module, "FULL_ONLY", False))


def run_part(name: str, folder: Path, seed: int, full: bool, seconds: float = math.inf) -> Result:
    """Run a part in an empty folder, for `seconds` at most."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    module: Any = importlib.import_module(f"fault_campaign.parts.{name}")
    limit = seconds if math.isfinite(seconds) else None
    made = {"seed": seed, "full": full, "within": limit, "date": _today(), "commit": _commit()}
    before = time.monotonic()
    counts: Iterable[Count] = module.run(Campaign(folder, seed, full, before + seconds))
    counts = tuple(
        Count(
            count.promise,
            count.trials,
            [failure.replace(str(folder), "…") for failure in count.failures],
        )
        for count in counts
    )
    # Read last, because nothing may start threads before a part forks.
    machine = {**describe_environment(), "cores": os.cpu_count()}
    return Result(name, counts, time.monotonic() - before, {**made, "machine": machine})


def _today() -> str:
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


def _commit() -> str:
    """The commit of the source, and whether it had changes; "unknown" outside a repository."""
    root = Path(__file__).parent
    lines = (["git", "rev-parse", "--short", "HEAD"], ["git", "status", "--porcelain", "-uno"])
    runs = [subprocess.run(a, cwd=root, capture_output=True, text=True, check=False) for a in lines]
    if any(done.returncode for done in runs):
        return "unknown"
    return runs[0].stdout.strip() + (" with changes" if runs[1].stdout.strip() else "")


def read_record(out: Path) -> dict[str, Result]:
    """The recorded results, by part."""
    results = {}
    for file in sorted(out.glob("*.json")):
        record = json.loads(file.read_text())
        counts = tuple(
            Count(item["promise"], item["trials"], item["found"]) for item in record["promises"]
        )
        results[record["part"]] = Result(record["part"], counts, record["seconds"], record["made"])
    return results


def write_record(result: Result, out: Path) -> None:
    """Write `out`/PART.json, and `out`/README.md of all recorded parts.

    Parts have separate files, so they can be run again in any order.
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

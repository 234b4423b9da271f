"""Run suites: measure what is not on record, write every case down, then tabulate and plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import TaskID, TimeRemainingColumn

from normattn.bench.case import Case, Suite
from normattn.bench.machine import require_packages
from normattn.bench.measure import WARM, Measurement, measure
from normattn.bench.page import page
from normattn.bench.profiling import top_operations
from normattn.bench.record import Record, Row, check_out
from normattn.bench.settings import Settings
from normattn.bench.suites import SUITES, chosen
from normattn.errors import InputError
from normattn.lab.report.page import write_files
from normattn.lab.report.terminal import Bar, print_table, say


def run_bench(
    names: Sequence[str], settings: Settings, out: Path, profile: bool = False
) -> list[Row]:
    """Measure the suites of these names (all for none) into `out`; return their rows.

    Rows on record for the same case, settings, machine, versions and source are not measured
    again, so a stopped run resumes. With `profile` the timed entries of missed goals are profiled.
    Writes SUITE.json, and the page (table.md, report.html, figures) of everything in `out`. Raises
    `InputError` for unknown suites, peers that are not installed, suites without a case on the
    device, and an `out` that is no folder.
    """
    suites = chosen(names)
    if not any(suite.cases(settings) for suite in suites):
        raise InputError(f"{', '.join(names)} measures nothing on {settings.device}")
    require_packages(dict.fromkeys(package for suite in suites for package in suite.packages))
    check_out(out)
    work = [
        (Record(_path(out, suite.name), suite, settings), case)
        for suite in suites
        for case in suite.cases(settings)
    ]
    with _Bar(work, settings) as bar:
        rows = [bar.run(record, case, profile) for record, case in work]
    _report(out, suites, settings)
    return rows


def _path(out: Path, suite: str) -> Path:
    return out / f"{suite.replace('-', '_')}.json"


def _report(out: Path, suites: Sequence[Suite], settings: Settings) -> None:
    """Tables and a figure of every record in the folder; the terminal shows what was asked for."""
    records = {
        name: Record(_path(out, name), suite, settings).rows() for name, suite in SUITES.items()
    }
    records = {name: rows for name, rows in records.items() if rows}
    made = page(records)
    figures = write_files(made, out)
    for suite, table in zip(records, made.tables, strict=False):
        if suite in {asked.name for asked in suites}:
            print_table(table, suite)
    say(out, figures)


class _Bar(Bar):
    """A bar over all cases that are still to be measured, weighted by their work."""

    def __init__(self, work: Sequence[tuple[Record, Case]], settings: Settings) -> None:
        super().__init__(TimeRemainingColumn())
        self._settings = settings
        self._rows = {id(case): record.find(case) for record, case in work}
        open_cases = [case for _, case in work if self._rows[id(case)] is None]
        self._count, self._done = len(work), 0
        total = sum(map(self._cost, open_cases))
        self._task: TaskID = self.progress.add_task("benchmarks", total=total)

    def run(self, record: Record, case: Case, profile: bool) -> Row:
        """The row of a case: the one on record, or a new one."""
        self.progress.update(self._task, description=case.name)
        row = self._rows[id(case)]
        said = "on record"
        if row is None:
            row, said = record.add(case, self._measure(case)), "measured"
        if profile and (profiles := self._profiles(case, row)):
            row = record.add(case, Measurement.read(_stored(row)), profiles)
            said += " and profiled"
        self._done += 1
        self.say(f"{case.name}: {said} ({self._done} of {self._count})")
        return row

    def _measure(self, case: Case) -> Measurement:
        """Measure, moving the bar with every round."""
        per_round = self._cost(case) / (self._settings.rounds + WARM)
        before = self.progress.tasks[0].completed

        def moved(done: int) -> None:
            self.progress.update(self._task, completed=before + per_round * (WARM + done))

        measurement = measure(case, self._settings, moved)
        self.progress.update(self._task, completed=before + self._cost(case))
        return measurement

    def _cost(self, case: Case) -> float:
        """About how long a case takes, in operations."""
        once = sum(entry.work().flops for entry in case.entries.values())
        return once * (self._settings.rounds + WARM)

    def _profiles(self, case: Case, row: Row) -> dict[str, Any]:
        """The profiles of timed entries that missed a goal, unless they are on record."""
        missed = [g["ours"] for g in row["goals"] if g["met"] is False and g["of"] == "time"]
        if set(missed) <= set(row["profiles"]):
            return {}
        wanted = dict.fromkeys(missed)
        return {name: top_operations(case.entries[name], self._settings) for name in wanted}


def _stored(row: Row) -> dict[str, Any]:
    kept = ("seconds", "memory_mib", "first_memory_mib", "machine")
    return {name: row[name] for name in kept}

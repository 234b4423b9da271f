"""Records → the page: goals and what was measured, times beside the machine's peaks, misses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from normattn.bench.case import TOLERANCE
from normattn.bench.judge import Verdict
from normattn.lab.report.context import PageContext
from normattn.lab.report.figure import IntervalColumn, Intervals, named
from normattn.lab.report.table import NOTHING, Cell, Column, Filled, Row
from normattn.lab.stats import Estimate

Stored = dict[str, Any]


def page(suites: Mapping[str, Sequence[Stored]]) -> PageContext:
    """The page of the records of some suites."""
    every = [row for rows in suites.values() for row in rows]
    goals = [_goals(name, rows) for name, rows in suites.items()]
    return PageContext(
        title="Ratios to peers, each within one interleaved run",
        question=_summary(every),
        tables=(*goals, *_times(every), *_profiles(every)),
        figures=named([_figure(name, rows) for name, rows in suites.items()]),
        notes=tuple(_missed(every)),
        provenance=_behind(every),
        command="normattn bench",
    )


def _filled(key: str, title: str, head: Sequence[str], lines: Sequence[Sequence[Cell]]) -> Filled:
    columns = tuple(Column("row" if n == 0 else name, name) for n, name in enumerate(head))
    rows = tuple(Row(line[0].text, {}) for line in lines)
    return Filled(key, title, "", (), columns, rows, tuple(map(tuple, lines)))


def _goals(suite: str, rows: Sequence[Stored]) -> Filled:
    """One line per goal."""
    lines = [
        (Cell(case), Cell(pair(goal)), goal.cell, Cell(goal.goal), Cell(_met(goal)))
        for case, goal in _verdicts(rows)
    ]
    head = ("case", "ours / peer", "measured [95 % interval]", "goal", "met")
    return _filled(suite.replace("-", "_"), suite, head, lines)


def _met(goal: Verdict) -> str:
    if goal.met is None:
        return "–"
    return "yes" if goal.exactly else f"within {100 * TOLERANCE:.0f} %" if goal.met else "no"


def _verdicts(rows: Sequence[Stored]) -> Iterator[tuple[str, Verdict]]:
    for row in rows:
        yield from ((row["case"], Verdict.read(goal)) for goal in row["goals"])


def pair(verdict: Verdict) -> str:
    """Which entries are compared, and in what unless it is time."""
    return f"{verdict.ours} / {verdict.peer}{'' if verdict.of == 'time' else f', {verdict.of}'}"


def _times(rows: Sequence[Stored]) -> list[Filled]:
    """Every timed entry: its median, and its shares of what the machine can do."""
    lines = [
        (
            Cell(row["case"]),
            Cell(entry),
            _number(1e3 * timing["median"], "{:.3g}"),
            _number(100 * line["gemm_seconds"] / timing["median"], "{:.1f}"),
            _number(100 * line["share"], "{:.1f}"),
            Cell(row["kernels"].get(entry, "–")),
        )
        for row in rows
        for entry, timing in row["seconds"].items()
        if (line := row["roofline"].get(entry))
    ]
    head = ("case", "entry", "ms", "of the product peak, %", "of the roofline, %", "kernel")
    return [_filled("times", "Times", head, lines)] if lines else []


def _profiles(rows: Sequence[Stored]) -> list[Filled]:
    """Where the time of missed goals goes, as it was profiled."""
    head = ("operation", "calls", "ms", "share, %")
    tables: list[Filled] = []
    for row in rows:
        for entry, operations in row.get("profiles", {}).items():
            lines = [
                (
                    Cell(f"`{line['operation']}`"),
                    _number(line["calls"], "{:.0f}"),
                    _number(line["milliseconds"], "{:.2f}"),
                    _number(100 * line["share"], "{:.0f}"),
                )
                for line in operations
            ]
            title = f"Profile of {entry}, {row['case']}"
            tables.append(_filled(f"profile_{len(tables)}", title, head, lines))
    return tables


def _number(value: float | None, form: str) -> Cell:
    return NOTHING if value is None else Cell(form.format(value), Estimate(float(value), units=1))


def _figure(suite: str, rows: Sequence[Stored]) -> Intervals:
    """Every ratio against 1 and against its goal; to the left ours is faster or smaller."""
    verdicts = list(_verdicts(rows))
    return Intervals(
        suite.replace("-", "_"),
        f"{suite}: time and peak memory beside the peers",
        tuple(f"{case}: {pair(goal)}" for case, goal in verdicts),
        (
            IntervalColumn(
                "ours beyond the peer, %",
                tuple(goal.beyond(1.0) for _, goal in verdicts),
                zero=True,
            ),
            IntervalColumn(
                "ours beyond the goal, %",
                tuple(goal.beyond(goal.limit) for _, goal in verdicts),
                zero=True,
            ),
        ),
    )


def _summary(rows: Sequence[Stored]) -> str:
    claimed = [goal for _, goal in _verdicts(rows) if goal.met is not None]
    if not claimed:
        return "A quick run: it shows that everything runs and claims nothing about goals."
    met = sum(goal.exactly for goal in claimed)
    near = sum(bool(goal.met) for goal in claimed) - met
    return (
        f"{met} of {len(claimed)} goals are met, {near} more within {100 * TOLERANCE:.0f} %, "
        f"{len(claimed) - met - near} are missed. A ratio is ours / peer of the medians of time or "
        "peak memory: below 1 ours is faster or smaller. Intervals resample the rounds. Memory is "
        "the peak of a step beyond what it was given, once it has run; first memory that of the "
        "first call, with what libraries compile and keep for it."
    )


def _missed(rows: Sequence[Stored]) -> list[str]:
    """Why each goal was missed."""
    return [
        f"Missed: {row['case']}: {goal['why']}."
        for row in rows
        for goal in row["goals"]
        if goal["why"]
    ]


def _behind(rows: Sequence[Stored]) -> dict[str, str]:
    """Machines, versions and dates of the rows."""
    dates: dict[str, str] = {}
    for row in rows:
        stamp, settings = row["stamp"], row["settings"]
        versions = ", ".join(f"{name} {version}" for name, version in stamp["versions"].items())
        machine = stamp.get("device", f"{stamp['processor']} ({stamp['capability']})")
        said = (
            f"{machine}, {settings['threads']} thread{'s' if settings['threads'] > 1 else ''}, "
            f"{settings['rounds']} rounds, Python {stamp['python']}, {versions}, source "
            f"{stamp['source']}"
        )
        dates.setdefault(said, row["date"])
    return {f"measured {date} ({n})": said for n, (said, date) in enumerate(dates.items(), 1)}

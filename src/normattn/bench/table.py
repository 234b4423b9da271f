"""Records → table.md and what the terminal shows: goal, measured, met."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from normattn.bench.judge import Verdict
from normattn.report.markdown import aligned as grid

Row = dict[str, Any]
_HEAD = ("what", "ours / peer", "measured (95 % interval)", "goal", "met")
_MET = {True: "yes", False: "no", None: "–"}


def lines(rows: Iterable[Row]) -> list[tuple[str, str, str, str, str]]:
    """One line per goal, as texts."""
    return [
        (row["case"], pair(verdict), verdict.shown, verdict.goal, _MET[verdict.met])
        for row in rows
        for verdict in map(Verdict.read, row["goals"])
    ]


def pair(verdict: Verdict) -> str:
    """Which entries are compared, and in what unless it is time."""
    return f"{verdict.ours} / {verdict.peer}{'' if verdict.of == 'time' else f', {verdict.of}'}"


def terminal(suite: str, rows: Sequence[Row]) -> Table:
    """A suite's goals as a coloured table, a heading for each case."""
    table = Table(*_HEAD[1:], title=escape(suite), title_justify="left", title_style="bold")
    colours = {"yes": "green", "no": "red", "–": "dim"}
    for row in rows:
        table.add_section()
        table.add_row(f"[bold]{escape(row['case'])}[/]")
        for _, *texts, met in lines([row]):
            table.add_row(*map(escape, texts), f"[{colours[met]}]{met}[/]")
    return table


def markdown(suites: Mapping[str, Sequence[Row]]) -> str:
    """The whole of table.md."""
    every = [row for rows in suites.values() for row in rows]
    parts = ["# Ratios to peers, each within one interleaved run", _summary(every)]
    parts += [f"## {name}\n\n{grid(_HEAD, lines(rows))}" for name, rows in suites.items()]
    parts += [_chosen(every), *_missed(every), _behind(every)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _summary(rows: Sequence[Row]) -> str:
    claimed = [goal["met"] for row in rows for goal in row["goals"] if goal["met"] is not None]
    if not claimed:
        return "A quick run: it shows that everything runs and claims nothing about goals."
    return (
        f"{sum(claimed)} of {len(claimed)} goals are met, within 5 %. A ratio is ours / peer of the"
        " medians of time or peak memory: below 1 ours is faster or smaller. Intervals resample"
        " the rounds. Memory is the peak of a step beyond what it was given, once it has run;"
        " first memory that of the first call, with what libraries compile and keep for it."
    )


def _missed(rows: Sequence[Row]) -> list[str]:
    """Why each goal was missed, and the profiles that were taken."""
    found = [
        f"- {row['case']}: {goal['why']}." for row in rows for goal in row["goals"] if goal["why"]
    ]
    parts = ["## Missed goals\n\n" + "\n".join(found)] if found else []
    for row in rows:
        for entry, operations in row.get("profiles", {}).items():
            parts.append(f"### Profile of {entry}, {row['case']}\n\n{_profile(operations)}")
    return parts


def _chosen(rows: Sequence[Row]) -> str:
    """Which kernel each of our entries ran."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for entry, kernel in row["kernels"].items():
            found.setdefault(kernel, []).append(f"{entry} ({row['case']})")
    named = [f"- {kernel}: {'; '.join(entries)}" for kernel, entries in found.items()]
    return "## Kernels that ran\n\n" + "\n".join(named) if named else ""


def _profile(operations: Sequence[Row]) -> str:
    head = ("operation", "calls", "ms", "share")
    body = [
        (
            f"`{row['operation']}`",
            f"{row['calls']:.0f}",
            f"{row['milliseconds']:.2f}",
            f"{row['share']:.0%}",
        )
        for row in operations
    ]
    return grid(head, body)


def _behind(rows: Sequence[Row]) -> str:
    """Machines, versions and dates of the rows."""
    found: dict[str, None] = {}
    for row in rows:
        stamp, settings = row["stamp"], row["settings"]
        versions = ", ".join(f"{name} {version}" for name, version in stamp["versions"].items())
        machine = stamp.get("device", f"{stamp['processor']} ({stamp['capability']})")
        found[
            f"- {row['date']}: {machine}, {settings['threads']} thread"
            f"{'s' if settings['threads'] > 1 else ''}, {settings['rounds']} rounds, Python "
            f"{stamp['python']}, {versions}, source {stamp['source']}"
        ] = None
    return "## Behind it\n\n" + "\n".join(found)

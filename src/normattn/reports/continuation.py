"""The tables and the figure of training that goes on at a longer length."""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normattn.atomic import write_text
from normattn.errors import InputError
from normattn.reports.bootstrap import Bootstrap
from normattn.reports.cells import VARIANT_ORDER, Cell, gather
from normattn.reports.figures.lines import COLOURS, Line, LinePanel, draw_lines
from normattn.reports.markdown import grid
from normattn.reports.metrics import Estimate, Metric, difference, estimate
from normattn.reports.records import Record
from normattn.reports.table import Divergence

LOSS = Metric("loss", "loss", "in loss", "", "loss", "tokens", 1.0)
ACCURACY = Metric("accuracy", "accuracy", "in accuracy", "")
_DIGITS = {"loss": 3, "accuracy": 1}


@dataclass(frozen=True)
class _Measured:
    """Every cell by row, step and length."""

    cells: Mapping[tuple[str, int, int], Cell]
    bootstrap: Bootstrap

    @property
    def rows(self) -> list[str]:
        """The rows in the order of the literature's tables."""
        return sorted({row for row, _, _ in self.cells}, key=_order)

    @property
    def lengths(self) -> list[int]:
        """The lengths that were read, ascending."""
        return sorted({length for _, _, length in self.cells})

    def steps(self, row: str) -> list[int]:
        """The steps at which a row was read, ascending."""
        return sorted({step for name, step, _ in self.cells if name == row})

    def value(self, row: str, step: int, length: int, metric: Metric) -> Estimate | None:
        """One statistic."""
        cell = self.cells.get((row, step, length))
        return None if cell is None else estimate(cell, metric, self.bootstrap)

    def gap(
        self, a: tuple[str, int, int], b: tuple[str, int, int], metric: Metric
    ) -> Estimate | None:
        """The statistic of `a` less that of `b`, paired."""
        first, second = self.cells.get(a), self.cells.get(b)
        if first is None or second is None or not set(first.seeds) & set(second.seeds):
            return None
        return difference(first, second, metric, self.bootstrap)


def continuation_report(
    records: Sequence[tuple[str, int, Record]],
    diverged: Sequence[tuple[str, Divergence]],
    out: Path,
    bootstrap: Bootstrap | None = None,
) -> list[Path]:
    """Write table.md, .csv, .json and the figure into `out`; return the figure's files.

    `records` are (row, continued steps, record): rows are named "KNA" or "Baseline with ABF". The
    same records give the same bytes. Raises `InputError` when there is nothing to report.
    """
    groups: dict[tuple[str, int, int], list[Record]] = defaultdict(list)
    for row, step, record in records:
        groups[row, step, record.length].append(record)
    if not groups:
        raise InputError("there is nothing to report: no evaluation record was found")
    cells = {key: gather(group) for key, group in groups.items()}
    measured = _Measured(cells, bootstrap or Bootstrap())
    write_text(out / "table.md", _markdown(measured, diverged))
    facts = _facts(measured)
    write_text(out / "table.json", json.dumps(facts, indent=2, allow_nan=False) + "\n")
    write_text(out / "table.csv", _csv(facts))
    return _figure(measured, out / "figures")


def _markdown(measured: _Measured, diverged: Sequence[tuple[str, Divergence]]) -> str:
    bootstrap = measured.bootstrap
    seeds = sorted({seed for cell in measured.cells.values() for seed in cell.seeds})
    documents = sorted({len(cell.documents) for cell in measured.cells.values()})
    parts = [
        "# Training that goes on at a longer length",
        f"Each model is trained at {measured.lengths[0]} tokens and then goes on at a longer "
        "length; PI and ABF, where a row names them, are switched on from then on (step 0: before "
        f"the first step). Natural held-out text, every token scored, {bootstrap.level:.0%} "
        f"intervals from {bootstrap.resamples} bootstrap resamples of the documents, and of the "
        f"seeds where there are several: {documents[0]} to {documents[-1]} documents, "
        f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}.",
        *(f"## {_title(metric)}\n\n{_table(measured, metric)}" for metric in (LOSS, ACCURACY)),
        f"## What was forgotten and gained\n\n{_changes(measured)}",
        _findings(measured),
        *(f"{row}, seed {d.seed}: diverged at step {d.step} in {d.where}." for row, d in diverged),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _title(metric: Metric) -> str:
    return "Loss, in nats per token" if metric is LOSS else "Accuracy, in %"


def _table(measured: _Measured, metric: Metric) -> str:
    head = ["score", "continued steps", *(f"at {length}" for length in measured.lengths)]
    lines = []
    for row in measured.rows:
        for step in measured.steps(row):
            values = (measured.value(row, step, length, metric) for length in measured.lengths)
            lines.append((row, str(step), *(_shown(value, metric) for value in values)))
    return grid(head, lines)


def _changes(measured: _Measured) -> str:
    """The last step less step 0 of the same trained model without any method, in loss."""
    lines = []
    for row in measured.rows:
        last = measured.steps(row)[-1]
        before = row.partition(" with ")[0]
        gaps = (
            measured.gap((row, last, length), (before, 0, length), LOSS)
            for length in measured.lengths
        )
        lines.append((row, str(last), *(_shown(gap, LOSS, signed=True) for gap in gaps)))
    head = ["score", "continued steps", *(f"at {length}" for length in measured.lengths)]
    return (
        "Change of the loss from the model as it was trained to the last step, paired over "
        f"documents and seeds; above 0 at {measured.lengths[0]}: forgotten.\n\n{grid(head, lines)}"
    )


def _findings(measured: _Measured) -> str:
    """Every other row against each row of Baseline after the last step."""
    rows = measured.rows
    lines = []
    for base in [row for row in rows if row.startswith("Baseline")]:
        for row in [row for row in rows if not row.startswith("Baseline")]:
            for length in measured.lengths[1:]:
                ends = [(name, measured.steps(name)[-1], length) for name in (row, base)]
                gap = measured.gap(ends[0], ends[1], LOSS)
                if gap is not None:
                    lines.append(f"- {_sentence(row, base, length, gap)}")
    if not lines:
        return ""
    head = (
        "After the last step, the scores with a norm, unchanged, against Baseline and its "
        "remedies. A difference counts only where its interval, paired over documents and seeds, "
        "excludes 0; each stands alone, and with one seed it speaks of these models only:"
    )
    return "\n".join((head, "", *lines))


def _sentence(row: str, base: str, length: int, gap: Estimate) -> str:
    said = f"{row} has a lower loss than {base} at {length}"
    size = f"difference {_shown(gap, LOSS, signed=True)} nats"
    if gap.below_zero:
        return f"{said}: {size}."
    other = f"; {base} has the lower one" if gap.above_zero else ""
    return f"{said} was not found: {size}{other}."


def _shown(value: Estimate | None, metric: Metric, signed: bool = False) -> str:
    if value is None:
        return "–"
    form = f"{'+' * signed}.{_DIGITS[metric.key]}f"
    if value.low is None or value.high is None:
        return f"{value.value:{form}} [no interval]"
    return f"{value.value:{form}} [{value.low:{form}}, {value.high:{form}}]"


def _facts(measured: _Measured) -> list[dict[str, Any]]:
    facts = []
    for row in measured.rows:
        for step in measured.steps(row):
            for length in measured.lengths:
                cell = measured.cells.get((row, step, length))
                if cell is None:
                    continue
                values = {m.key: measured.value(row, step, length, m) for m in (LOSS, ACCURACY)}
                facts.append(
                    {
                        "name": row,
                        "spec": cell.row.spec,
                        "continued_steps": step,
                        "length": length,
                        **{key: v.as_json() if v else None for key, v in values.items()},
                    }
                )
    return facts


def _csv(facts: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    plain = ("name", "spec", "continued_steps", "length")
    fields = ("value", "low", "high")
    head = [f"{key}_{field}".removesuffix("_value") for key in _DIGITS for field in fields]
    writer.writerow((*plain, *head, "documents", "tokens", "seeds"))
    for fact in facts:
        values = [fact[key] or {} for key in _DIGITS]
        counts = [values[0].get(key, "") for key in ("documents", "tokens", "seeds")]
        numbers = [value.get(field, "") for value in values for field in fields]
        writer.writerow((*(fact[key] for key in plain), *numbers, *counts))
    return text.getvalue()


def _figure(measured: _Measured, folder: Path) -> list[Path]:
    colours = dict(zip(measured.rows, COLOURS, strict=False))
    panels = []
    for metric in (LOSS, ACCURACY):
        for length in measured.lengths:
            lines = []
            for row in measured.rows:
                points = tuple(
                    (float(step), value)
                    for step in measured.steps(row)
                    if (value := measured.value(row, step, length, metric)) is not None
                )
                if points:
                    colour = colours.get(row, "#7F7F7F")
                    lines.append(Line(row, points, colour, dashed=" with " in row))
            unit = "loss (nats per token)" if metric is LOSS else "accuracy (%)"
            panels.append(LinePanel(f"{metric.title}, read at {length}", unit, tuple(lines)))
    steps = sorted({step for row in measured.rows for step in measured.steps(row)})
    return draw_lines(
        panels,
        folder,
        "going_on",
        title="Training that goes on at a longer length: with and without a change",
        caption=(
            "Step 0 is the model as it was trained at the shortest length, read under the method "
            "that training then goes on with. Upright lines: 95 % bootstrap interval over "
            "documents (and seeds). Dashed, hollow: positions changed by PI or ABF."
        ),
        x_label="continued steps",
        x_ticks=[(float(step), str(step)) for step in steps],
    )


def _order(row: str) -> tuple[int, str]:
    variant = row.partition(" with ")[0]
    place = VARIANT_ORDER.index(variant) if variant in VARIANT_ORDER else len(VARIANT_ORDER)
    return place, row

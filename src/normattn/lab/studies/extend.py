"""How far does an existing model read a text of one's own, by which post-hoc method, at what cost?

`normattn extend MODEL` measures it: every method reads the same windows of the text. A shorter
length is a window's end, so that the same last tokens are scored after contexts of every length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from normattn.lab.report.figure import (
    Curves,
    Figure,
    IntervalColumn,
    Intervals,
    Line,
    Mark,
    Panel,
    Point,
)
from normattn.lab.report.page import Page
from normattn.lab.report.points import bin_points, octaves
from normattn.lab.report.table import NOTHING, Cell, Column, Row, Table, shown
from normattn.lab.report.view import View
from normattn.lab.runs import RunDirectory
from normattn.lab.stats import Estimate, MeasurementStore, Metric
from normattn.lab.stats.arrays import Array, Where
from normattn.lab.stats.metrics import accuracy, loss
from normattn.lab.studies._advice import (
    LAST,
    LOSS,
    advise,
    cost_at_train_length,
    home,
    lengths_of,
    methods_of,
    name_of,
    resolved,
    spoken,
)
from normattn.lab.sweep.study import Study, measured_by

KIND, MEASUREMENTS = "extend", "measurements"
TRAIN, POSITION, KEY, PREFILL = "train_length", "by_position", "retrieval", "prefill"
SECONDS, PEAK = "prefill_seconds", "peak_bytes"
ACCURACY, POSITION_LOSS = accuracy(), loss()
EXACT = accuracy("pass keys found", "exact")
LINEAR = 0.1
"""Nats: where the axis of changes turns logarithmic, as a model as it is loses a hundredfold."""

MEASURED = (
    "s: the decoder over one whole window without a cache and without the head, the median over "
    "windows. MiB: the most that the process grew beyond what it held with the model loaded, of "
    "all windows.",
)
KEYS = (
    "pass keys: one of five digits is stated in each window, at a depth of its own, and asked for "
    "at the end; it is found where greedy decoding would give every digit.",
)


def complete(measured: pl.DataFrame, windows: int) -> pl.DataFrame:
    """The rows of every method and length whose text was read in all its windows."""
    text = measured.filter(pl.col("protocol") == LAST)
    counts = text.group_by("method", "length").agg(pl.col("unit").n_unique().alias("read"))
    whole = counts.filter(pl.col("read") == windows)
    return measured.join(whole.select("method", "length"), on=["method", "length"], how="semi")


def collect(out: Path) -> pl.DataFrame:
    """What was read in every window, of the run directory `out`."""
    windows = int(RunDirectory.existing(out).config["windows"])
    return complete(MeasurementStore(out / MEASUREMENTS).frame(), windows)


def _rows(view: View) -> list[Row]:
    return [Row(name_of(method), {"method": method}) for method in methods_of(view)]


def _with_parameters(view: View, row: Row) -> Cell:
    method = str(row.where["method"])
    return Cell(resolved(view, method)) if method else NOTHING


def _by_length(key: str, statistic: Metric) -> Callable[[View], Sequence[Column]]:
    """A column for every length, of the last tokens."""

    def columns(view: View) -> list[Column]:
        whole = Column("parameters", "with its parameters", plain=_with_parameters)
        all_columns = [whole] if key == "loss" else []
        for length in lengths_of(view):
            last = statistic.at(protocol=LAST, length=length)
            all_columns.append(Column(f"{key}_{length}", spoken(length), last))
        return all_columns

    return columns


def _changes(view: View) -> list[Column]:
    """By how much the loss lies above that of the model as it is after its training length."""
    last = LOSS.at(protocol=LAST)
    known = last.at(length=home(view), method="")
    return [
        Column(f"change_{n}", f"after {spoken(n)}", last.at(length=n) - known)
        for n in lengths_of(view)
    ]


def _octaves(statistic: Metric) -> Callable[[View], Sequence[Column]]:
    """Loss or accuracy at the longest length in bins up to L, 2 L, 4 L …"""

    def columns(view: View) -> list[Column]:
        at = {"protocol": POSITION}
        return [
            Column(f"{statistic.name}_{low}", title, statistic.at(at).between(span), interval=False)
            for low, title, span in octaves(view, statistic, at)
        ]

    return columns


def _change(view: View, row: Row) -> Cell:
    """By how many percent the loss at the training length rises under a method."""
    cost = cost_at_train_length(view, str(row.where["method"]))
    return NOTHING if cost is None else Cell(shown(cost, 2, signed=True), cost)


def _prefill(view: View) -> list[Column]:
    """Seconds, memory and pass keys at every length."""
    columns = []
    for length in lengths_of(view):
        at = {"protocol": PREFILL, "length": length}
        name = spoken(length)
        columns += [
            Column(f"seconds_{length}", f"{name}: s", plain=_of_windows(SECONDS, at, np.median)),
            Column(f"bytes_{length}", f"{name}: MiB", plain=_of_windows(PEAK, at, np.max)),
            Column(f"keys_{length}", f"{name}: pass keys", plain=_keys(length)),
        ]
    return columns


def _of_windows(
    statistic: str, at: Where, combined: Callable[[Array], Any]
) -> Callable[[View, Row], Cell]:
    """One number of all windows: seconds, or bytes shown in MiB."""

    def cell(view: View, row: Row) -> Cell:
        sums = view.sums(statistic, {**row.where, **at})
        if sums is None:
            return NOTHING
        value = float(combined(sums.numerator))
        text = f"{value:.1f}" if statistic == SECONDS else f"{value / 2**20:,.0f}"
        return Cell(text, Estimate(value, units=len(sums.units)))

    return cell


def _keys(length: int) -> Callable[[View, Row], Cell]:
    def cell(view: View, row: Row) -> Cell:
        where = {**row.where, "protocol": KEY, "length": length}
        estimate = view.estimate(EXACT, where)
        sums = view.sums(EXACT.name, where)
        if estimate is None or sums is None:
            return NOTHING
        return Cell(f"{sums.numerator.sum():.0f} of {sums.denominator.sum():.0f}", estimate)

    return cell


def _measured_notes(view: View) -> Sequence[str]:
    return MEASURED + (KEYS if view.values("unit", {"protocol": KEY}) else ())


def _advice(view: View) -> list[str]:
    """What to take, and what was scored."""
    scored = view.sums(LOSS.name, {"protocol": LAST, "length": lengths_of(view)[-1], "method": ""})
    said = [*advise(view).sentences]
    trained = int(view.frame["train_length"][0])
    start = f"Trained to read {trained:,} tokens, not trained further."
    if scored is not None:
        start += (
            f" The last {scored.denominator[0, 0].sum():,.0f} tokens of every window are scored."
        )
    return [*said, start]


def figures(view: View) -> list[Figure]:
    """What longer contexts do to the same last tokens, and the longest length by position."""
    trained, known = int(view.frame["train_length"][0]), spoken(home(view))
    return [
        Intervals(
            "last_segment",
            f"Nats above the model as it is after {known}, for the same last tokens; the axis is "
            f"linear within ±{LINEAR}",
            tuple(row.label for row in _rows(view)),
            tuple(
                IntervalColumn(
                    column.title,
                    tuple(column.cell(view, row).estimate for row in _rows(view)),
                    zero=True,
                )
                for column in _changes(view)
            ),
            LINEAR,
        ),
        Curves(
            "reading_by_position",
            "Your text, by position",
            tuple(
                Panel(
                    *(statistic.title, _position_lines(view, statistic), "tokens read", unit, True),
                    marks=(Mark(float(trained), "L"),),
                )
                for statistic, unit in ((POSITION_LOSS, "nats"), (ACCURACY, "next tokens (%)"))
            ),
            shared_y=False,
        ),
    ]


def _position_lines(view: View, statistic: Metric) -> tuple[Line, ...]:
    lines = []
    for method in methods_of(view):
        at = {"method": method, "protocol": POSITION}
        plotted = bin_points(view, statistic, at, lambda bin_: bin_[3])
        if plotted:
            lines.append(_line(method, plotted))
    return tuple(lines)


def _line(method: str, plotted: tuple[Point, ...]) -> Line:
    """Methods that differ in log-n alone share a colour."""
    family = method.removesuffix("-logn+") or "as is"
    return Line(name_of(method), plotted, family, dashed=method != family and bool(method))


def _table(
    key: str,
    title: str,
    columns: tuple[Column, ...] | Callable[[View], Sequence[Column]],
    notes: Callable[[View], Sequence[str]] | tuple[str, ...] = (),
) -> Table:
    """A table with a row for each method."""
    return Table(key, title, _rows, columns, notes=notes, head="method")


PAGE = Page(
    title="Reading past the training length, without training",
    question="How far does this model read this text, by which method, and at what cost?",
    sources=("kexue.fm/archives/9708", "arXiv:2309.00071", "arXiv:2401.01325"),
    tables=(
        _table(
            "table",
            "Loss on the same last tokens, by length of the context (nats)",
            _by_length("loss", LOSS),
            _advice,
        ),
        _table(
            "change",
            "How far it lies above that of the model as it is after its training length (nats, "
            "paired over windows; 0: nothing is lost)",
            _changes,
        ),
        _table(
            *("accuracy", "Accuracy on the same last tokens (%)"), _by_length("accuracy", ACCURACY)
        ),
        _table(
            "loss_by_position",
            "Loss by position at the longest length (nats)",
            _octaves(POSITION_LOSS),
        ),
        _table(
            "accuracy_by_position",
            "Accuracy by position at the longest length (%)",
            _octaves(ACCURACY),
        ),
        _table(
            "cost",
            "What it costs at the training length",
            (
                Column("loss", "loss, nats", LOSS.at(protocol=TRAIN)),
                Column("change", "more than as it is, %", plain=_change),
            ),
        ),
        _table(
            "prefill",
            "Seconds of a prefill, peak memory, pass keys found",
            *(_prefill, _measured_notes),
        ),
    ),
    figures=figures,
    summary=lambda view: advise(view).sentences[:2],
)

STUDY = Study(
    name=KIND,
    help="How far a model reads past its training length, by every post-hoc method.",
    resolve=measured_by("normattn extend MODEL"),
    cells=(),
    page=PAGE,
    collect=collect,
    made_by="normattn extend MODEL",
)

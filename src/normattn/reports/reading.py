"""Reading on: accuracy and loss by position, far past the training length, one curve per row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from normattn.reports.bootstrap import Bootstrap
from normattn.reports.cells import Cell, Cells, RowKey, row_labels
from normattn.reports.curves import Point
from normattn.reports.markdown import FEW, few_note, grid
from normattn.reports.metrics import Metric, curve

PROTOCOL = "by_position"
ACCURACY = Metric("reading", "accuracy", "by position", PROTOCOL)
LOSS = Metric("reading_loss", "loss", "in loss by position", PROTOCOL, "loss", "tokens", 1.0)


@dataclass(frozen=True)
class Reading:
    """One row's curves: accuracy in % and loss in nats over the same bins of positions."""

    row: RowKey
    accuracy: tuple[Point, ...]
    loss: tuple[Point, ...]
    documents: int
    tokens: int
    seeds: int


def readings(cells: Cells, bootstrap: Bootstrap, octaves: bool = False) -> list[Reading]:
    """The curves of every row that was read by position; with `octaves` in bins L, 2L, 4L …"""
    found = []
    for row in cells.rows:
        cell = cells.get(row, PROTOCOL)
        if cell is not None:
            shown = _in_octaves(cell) if octaves else cell
            found.append(
                Reading(
                    row=row,
                    accuracy=_points(shown, ACCURACY, bootstrap),
                    loss=_points(shown, LOSS, bootstrap),
                    documents=len(cell.documents),
                    tokens=round(float(cell.sums["tokens"][0].sum())),
                    seeds=len(cell.seeds),
                )
            )
    return found


def reading_markdown(readings_in_octaves: Sequence[Reading], bootstrap: Bootstrap) -> str:
    """reading.md: accuracy and loss between 1, 2, 4 … training lengths, with intervals."""
    parts = [
        "# Reading past the training length",
        f"Natural held-out text, every token scored, in octaves of the training length, with "
        f"{100 * bootstrap.level:g}% intervals from {bootstrap.resamples} bootstrap resamples of "
        "the documents (and of the seeds where there are several).",
    ]
    for length in sorted({each.row.train_length for each in readings_in_octaves}):
        shown = [each for each in readings_in_octaves if each.row.train_length == length]
        parts += [f"## Accuracy, % (training length {length})", _table(shown, "accuracy", 1)]
        parts += [f"## Loss, nats (training length {length})", _table(shown, "loss", 3)]
        counts = sorted({(each.documents, each.tokens, each.seeds) for each in shown})
        behind = "; ".join(f"{d:,} documents, {t:,} tokens, seeds: {s}" for d, t, s in counts)
        few = any(each.documents < FEW for each in shown)
        parts.append(f"Behind each row: {behind}.{few_note('documents') if few else ''}")
    return "\n\n".join(parts) + "\n"


def reading_lines(curves: Sequence[Reading]) -> tuple[list[str], list[list[object]]]:
    """The head and the lines of reading.csv: one bin of one row a line."""
    head = ["name", "variant", "method", "spec", "train_length", "from", "to"]
    head += ["accuracy", "low", "high", "loss", "loss_low", "loss_high"]
    lines: list[list[object]] = []
    for each in curves:
        key = each.row
        start = [key.name, key.variant, key.method, key.spec, key.train_length]
        for accuracy, loss in zip(each.accuracy, each.loss, strict=True):
            place = [accuracy.first, accuracy.last]
            values = [accuracy.value, accuracy.low, accuracy.high, loss.value, loss.low, loss.high]
            lines.append([*start, *place, *values])
    return head, lines


def _points(cell: Cell, metric: Metric, bootstrap: Bootstrap) -> tuple[Point, ...]:
    """Positions count from 1: the number of tokens that the model has read."""
    values, low, high = curve(cell, metric, bootstrap)
    known = len(cell.documents) > 1
    return tuple(
        Point(
            first + 1,
            last,
            _rounded(values[bin_]),
            _rounded(low[bin_]) if known else None,
            _rounded(high[bin_]) if known else None,
        )
        for bin_, (first, last) in enumerate(pairwise(cell.edges))
        if not math.isnan(values[bin_])
    )


def _in_octaves(cell: Cell) -> Cell:
    """The cell with its bins added up to 0 … L, L … 2L, 2L … 4L and so on."""
    length = cell.row.train_length
    wanted = {length * 2**octave for octave in range(40)}
    starts = [i for i, edge in enumerate(cell.edges[:-1]) if i == 0 or edge in wanted]
    sums = {field: np.add.reduceat(value, starts, axis=2) for field, value in cell.sums.items()}
    return replace(cell, edges=(*(cell.edges[i] for i in starts), cell.edges[-1]), sums=sums)


def _table(shown: Sequence[Reading], kind: str, digits: int) -> str:
    first: tuple[Point, ...] = getattr(shown[0], kind)
    head = ["score", *(f"{point.first:,} to {point.last:,}" for point in first)]
    labels = row_labels(each.row for each in shown)
    lines = [
        (labels[each.row], *(_shown(point, digits) for point in getattr(each, kind)))
        for each in shown
    ]
    return grid(head, lines)


def _shown(point: Point, digits: int) -> str:
    if point.low is None or point.high is None:
        return f"{point.value:.{digits}f} [no interval]"
    return f"{point.value:.{digits}f} [{point.low:.{digits}f}, {point.high:.{digits}f}]"


def _rounded(value: float) -> float:
    return round(float(value), 9) + 0.0

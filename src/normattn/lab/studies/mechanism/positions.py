"""Whether a key's norm carries its position, which the source leaves open."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from normattn.lab.diagnostics.key_norms import FIRST
from normattn.lab.report.claim import Claim
from normattn.lab.report.table import NOTHING, Cell, Column, Row, Table
from normattn.lab.report.view import View
from normattn.lab.stats import Metric
from normattn.lab.stats.metrics import Array, Value, mean
from normattn.lab.studies.mechanism.measured import (
    SOURCE_OPEN,
    column,
    lengths,
    measured_rows,
    where,
)

SIZE = mean("position_size", "size")


def table() -> Table:
    """What ‖k_j‖ says of j: the key as the score sees it, and before any norm."""
    return Table(
        "positions",
        "Does a key's norm carry its position?",
        lambda view: measured_rows(view, "raw_position"),
        lambda view: (*_columns(view, "", "as the score sees it"), *_columns(view, "raw_", "raw")),
        notes=(
            "rank correlation: Spearman's, between ‖k_j‖ and j within a text of the training "
            f"length, the first {FIRST} keys left out; mean over layers, heads of keys and texts. "
            "Above 0 norms grow with the position; heads of opposite signs cancel.",
            "heads + / − / all: heads of all trained models, those whose own interval over "
            "documents lies above or below 0; by chance one of forty is above and one below.",
            "size: the same in every second document, with the sign turned by that which the head "
            "has in the other documents, so that heads of opposite signs add up. Chance gives 0, "
            "also where neighbouring keys have similar norms; it would raise a mean of |ρ|.",
            f"first key, next {FIRST - 1}: their norm over the median norm of all after them.",
            "as the score sees it, raw: after and before the key's normalisation.",
        ),
    )


def _columns(view: View, side: str, said: str) -> list[Column]:
    position, first, at = f"{side}position", f"{side}first_norms", lengths(view)[0]
    one, more = (Metric(first, "", _of_first(part), "", 2) for part in (slice(1), slice(1, None)))
    size = mean(f"{side}position_size", "")
    return [
        column(position, f"rank correlation, {said}", mean(position, ""), at, "one norm"),
        Column(f"{position}_heads", f"heads + / − / all, {said}", plain=_heads_of(position)),
        column(f"{position}_size", f"size, {said}", size, at),
        column(f"{side}first_key", f"first key, {said}", one, at),
        column(f"{side}next_keys", f"next {FIRST - 1}, {said}", more, at),
    ]


def _of_first(chosen: slice) -> Value:
    """The mean over texts, heads and the `chosen` of the first keys."""

    def value(above: Array, below: Array, *whole: Array) -> Array:
        parts = (x.reshape(*x.shape[:-1], -1, FIRST)[..., chosen] for x in (above, below))
        total, count = (part.sum((-2, -1)) for part in parts)
        return np.asarray(total / count)

    return value


def heads(view: View, row: str, statistic: str) -> str | None:
    """Heads of every trained model whose own interval lies above 0, below 0, and all of them."""
    at = {"row": row, **where(view)}
    sums = view.sums(statistic, at)
    if sums is None or not sums.denominator.any():
        return None
    only = mean(statistic, "")
    own = [
        view.estimate(only, {**at, "seed": seed, "layer": layer, "head": head})
        for seed in sums.seeds
        for layer, head, *_ in sums.bins
    ]
    above = sum(head is not None and head.above_zero for head in own)
    below = sum(head is not None and head.below_zero for head in own)
    return f"{above} / {below} / {len(own)}"


def _heads_of(statistic: str) -> Callable[[View, Row], Cell]:
    def cell(view: View, row: Row) -> Cell:
        counted = heads(view, row.where["row"], statistic)
        return NOTHING if counted is None else Cell(counted)

    return cell


def claims(view: View) -> list[Claim]:
    """What would answer the question with yes; a frame without the measure does not test it."""
    counted = heads(view, "Baseline", "position")
    return [
        Claim(
            "a key's norm carries its position, whichever way",
            SIZE.at(where(view, row="Baseline")),
            SOURCE_OPEN,
            "Baseline: rank correlation of ‖k‖ and its position, its size (heads + / − / all: "
            f"{counted})",
        )
    ]

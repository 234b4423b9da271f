"""Whether unseen positions matter more than the cosines' range, which the source leaves open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np

from normattn.lab.diagnostics.ranges import READINGS, REGIONS, TAIL
from normattn.lab.report.claim import Claim
from normattn.lab.report.figure import Figure, IntervalColumn, Intervals
from normattn.lab.report.table import Column, Table
from normattn.lab.report.view import View
from normattn.lab.stats import Metric
from normattn.lab.stats.metrics import Array
from normattn.lab.studies.mechanism.measured import (
    SOURCE_OPEN,
    column,
    lengths,
    measured_rows,
    where,
)

Weights = Callable[[Array, Array], Array]
"""(sums, counts), each (…, bins of the axis), to a number."""


def _percent(name: str, bins: int, weights: Weights) -> Metric:
    """Per cent, made of the sums over layers and heads of each bin of an axis."""

    def value(above: Array, below: Array, *whole: Array) -> Array:
        parts = (x.reshape(*x.shape[:-1], -1, bins).sum(-2) for x in (above, below))
        return np.asarray(100 * weights(*parts))

    return Metric(name, "", value, "%", 2)


def _share(part: Array, whole: Array) -> Array:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(whole > 0, part / whole, np.nan)


def _outside(near_or_far: int) -> Weights:
    """The share outside the range of the pairs nearer than L (0) or further (1)."""
    inside, outside = 2 * near_or_far, 2 * near_or_far + 1
    return lambda above, _: _share(above[..., outside], above[..., inside] + above[..., outside])


def _attention(region: str) -> Metric:
    index = REGIONS.index(region)
    return _percent("attention", len(REGIONS), lambda *sums: _share(*sums)[..., index])


def _reading(name: str, ours: str, theirs: str | None = None) -> Metric:
    """Of the last L tokens in one reading, or less that in another; a loss is in nats."""
    first, second = (READINGS.index(reading or ours) for reading in (ours, theirs))

    def weights(above: Array, below: Array) -> Array:
        value = _share(above, below)
        return value[..., first] if theirs is None else value[..., first] - value[..., second]

    if name == "last_accuracy":
        return _percent(name, len(READINGS), weights)
    return Metric(name, "", lambda above, below, *whole: weights(above, below), "nats", 3)


PAIRS = len(REGIONS)
NEAR, FAR = (_percent("pairs", PAIRS, _outside(far)) for far in (0, 1))
FURTHER = _percent("pairs", PAIRS, lambda *sums: _outside(1)(*sums) - _outside(0)(*sums))
CLAMPED = _reading("last_accuracy", "clamped", "as is")


def tables() -> tuple[Table, Table]:
    """Where cosines leave their range, and what positions that were never trained cost."""
    return (
        Table(
            "distances",
            "Where do cosines leave their trained range?",
            lambda view: measured_rows(view, "pairs"),
            _range_columns,
            notes=(
                f"outside: the cosine lies outside the range that its head has at L ({TAIL:.1%} "
                "left out at either end, so that up to twice as much is outside at L itself). "
                "Nearer than L: at a distance i − j < L, which was trained; further: at i − j ≥ L, "
                "which was not. Of the pairs of each kind, read at the longer length; difference: "
                "further − nearer.",
                "attention: of all attention of the queries at i ≥ L, mean over heads; what is "
                "left of 100 is inside the range at trained distances, or a sink's.",
            ),
        ),
        Table(
            "clamped",
            "What do unseen positions cost?",
            lambda view: measured_rows(view, "last_accuracy"),
            _clamped_columns,
            notes=(
                "Accuracy in % and loss in nats of the last L tokens of each text. Alone: with "
                "nothing before them; as is: behind the whole text; clamped: the same with every "
                "relative position from L − 1 on read as L − 1 (ReRoPE with w = L − 1), switched "
                "on in the trained model, so that no pair is at a position that was not trained.",
                "What clamping gives back is what unseen positions took; what then still lacks to "
                "the tokens alone, something else took: the number of keys, or cosines out of "
                "range.",
            ),
        ),
    )


def _range_columns(view: View) -> Sequence[Column]:
    longer = lengths(view)[1]
    columns = (
        ("near_outside", "pairs nearer than L, outside, %", NEAR),
        ("far_outside", "pairs further, outside, %", FAR),
        ("further", "difference", FURTHER),
        ("near_attention", "attention nearer, outside, %", _attention("near outside")),
        ("far_attention", "attention further, outside, %", _attention("far outside")),
        ("far_inside", "attention further, inside, %", _attention("far inside")),
    )
    return [column(key, title, statistic, longer) for key, title, statistic in columns]


def _clamped_columns(view: View) -> Sequence[Column]:
    longer = lengths(view)[1]
    columns = []
    for name, said in (("last_accuracy", "accuracy"), ("last_loss", "loss")):
        terms: list[tuple[str, str | None]] = [(reading, None) for reading in READINGS]
        for ours, theirs in (*terms, ("as is", "alone"), ("clamped", "as is")):
            title = f"{said}, {ours}" + (f" − {theirs}" if theirs else "")
            key = f"{said}_{ours}" + (f"_less_{theirs}" if theirs else "")
            statistic = _reading(name, ours, theirs)
            columns.append(column(key.replace(" ", "_"), title, statistic, longer))
    return columns


def figures(view: View) -> list[Figure]:
    """The accuracy of the last tokens in every reading; none of a frame without it."""
    scores, longer = measured_rows(view, "last_accuracy"), lengths(view)[1]
    if not scores:
        return []
    known = {}
    for row, reading in product(scores, READINGS):
        cell = column("", "", _reading("last_accuracy", reading), longer).cell(view, row)
        if cell.estimate is not None:
            known[f"{row.label}, {reading}"] = cell.estimate
    title = f"The last {lengths(view)[0]:,} of {longer:,} tokens"
    accuracy = IntervalColumn("accuracy, %", tuple(known.values()))
    return [Intervals("last_accuracy", title, tuple(known), (accuracy,))]


def claims(view: View) -> list[Claim]:
    """What would answer the question with yes; a frame without the measures tests none."""
    near, longer = lengths(view)
    said = (
        (
            "{}'s cosines leave their trained range at unseen distances rather than at trained "
            "ones",
            f"share of pairs outside, at i − j ≥ {near:,} − nearer",
            FURTHER,
        ),
        (
            "unseen positions cost {} accuracy on longer text",
            f"accuracy of the last {near:,} of {longer:,} tokens, positions clamped − as is",
            CLAMPED,
        ),
    )
    return [
        Claim(
            sentence.format(row),
            statistic.at(where(view, row=row, length=longer)),
            *(SOURCE_OPEN, f"{row}: {measured}"),
        )
        for sentence, measured, statistic in said
        for row in ("Baseline", "KNA")
    ]

"""What was measured, as the tables, claims and figures of the study ask for it."""

from __future__ import annotations

from functools import cache

import numpy as np

from normattn.errors import InputError
from normattn.kernels.cosines import BINS
from normattn.lab.diagnostics.ranges import TAIL, trained_range
from normattn.lab.report.table import NOTHING, Cell, Column, Row, shown
from normattn.lab.report.view import View
from normattn.lab.stats import Metric, Sums
from normattn.lab.stats.metrics import Array, crossing, mean
from normattn.lab.studies.base import VARIANT_ORDER, ranked

SOURCE_OPEN = "kexue 9859, left open"
"""Of a question that the source asks and does not answer."""
QUANTILES = (TAIL, 0.25, 0.5, 0.75, 1 - TAIL)
CORRELATION = mean("correlation", "rank correlation")
RAW = mean("raw_correlation", "before the norm")
SPREAD = mean("spread", "spread of ‖k‖")


def lengths(view: View) -> tuple[int, int]:
    """The training length, and the longer one; `InputError` before any model was looked into."""
    measured = view.values("length", {"protocol": "mechanism"})
    if not measured:
        raise InputError("there is nothing to report yet: no trained model was looked into")
    return min(measured), max(measured)


def rows(view: View) -> list[Row]:
    """The scores that were looked into."""
    return _rows(view.values("row", {"protocol": "mechanism"}))


def measured_rows(view: View, statistic: str) -> list[Row]:
    """The scores of which a statistic was measured."""
    return _rows(view.values("row", {"protocol": "mechanism", "statistic": statistic}))


def _rows(names: list[str]) -> list[Row]:
    return [Row(name, {"row": name}) for name in ranked(names, VARIANT_ORDER)]


def where(view: View, **more: object) -> dict[str, object]:
    """Where the measurements at the training length are; `more` overrides and adds columns."""
    return {
        "protocol": "mechanism",
        "length": lengths(view)[0],
        "factor.received": None,
        **more,
    }


def column(
    key: str, title: str, statistic: Metric, length: int, without: str = NOTHING.text
) -> Column:
    """A statistic at a length; `without` where nothing was counted."""

    def cell(view: View, row: Row) -> Cell:
        estimate = view.estimate(statistic, {**row.where, **where(view, length=length)})
        if estimate is None:
            return NOTHING
        if not np.isfinite(estimate.value):
            return Cell(without)
        return Cell(shown(estimate, statistic.digits), estimate)

    return Column(key, title, plain=cell)


def cosine_columns(view: View, key: str, length: int) -> list[Column]:
    """The quantiles of the cosines at a length."""
    return [
        Column(
            f"cosine_{key}_{share:g}",
            f"cosine, {share:.1%} at {length:,}",
            cosine_quantile(share).at(where(view, length=length)),
        )
        for share in QUANTILES
    ]


@cache
def cosine_quantile(share: float) -> Metric:
    """A quantile of the cosines, the mean over heads."""

    def value(above: Array, below: Array, *whole: Array) -> Array:
        heads = above.reshape(*above.shape[:-1], -1, BINS)
        return np.asarray(crossing(heads, share, (-1.0, 1.0)).mean(-1))

    return Metric("cosine", "cosine", value, "", 2)


def outside(near: Sums) -> Metric:
    """The share (%) of cosines in bins that hold none of the cosines at L, but for their tails.

    Each seed is a model with a range of its own.
    """
    counts = near.numerator.sum(1)
    allowed = np.stack([trained_range(seed.reshape(-1, BINS)).reshape(-1) for seed in counts])

    def value(above: Array, below: Array, *whole: Array) -> Array:
        return np.asarray(100 * np.where(allowed, 0.0, above).sum(-1) / above.sum(-1))

    return Metric("cosine", "outside", value, "%", 2)

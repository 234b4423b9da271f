"""The page of an inspection: a row for every layer, and one for every head."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from normattn.lab.report.page import Page
from normattn.lab.report.table import NOTHING, Cell, Column, Row, Table
from normattn.lab.report.view import View
from normattn.lab.stats import Estimate
from normattn.lab.studies.inspect.figures import figures
from normattn.lab.studies.inspect.measured import (
    MORE,
    QUANTITIES,
    SHARES,
    cosines,
    heads,
    inspected,
    layers,
    over_heads,
    told,
)

SHOWN = (("least", 0), *((f"{share:.0%}", n) for n, share in enumerate(SHARES, 1)), ("largest", 4))


def _layer_rows(view: View) -> list[Row]:
    return [Row(title, {"layer": layer}) for layer, title in layers(view).items()]


def _head_rows(view: View) -> list[Row]:
    return [
        Row(f"{title}, head {head}", {"layer": layer, "head": head})
        for layer, title in layers(view).items()
        for head in range(len(heads(view, "entropy", layer)))
    ]


def _layer_columns(view: View) -> list[Column]:
    """Means over the heads of a layer, of largest logits the largest."""
    return [
        *(
            Column(quantity.name, quantity.short, plain=_of_layer(quantity.name, quantity.digits))
            for quantity in told(view, QUANTITIES)
        ),
        Column("cosines", "cos 5–95 %", plain=_cosine_range),
    ]


def _head_columns(view: View) -> list[Column]:
    return [
        *(
            Column(quantity.name, quantity.title, plain=_of_head(quantity.name, quantity.digits))
            for quantity in told(view, (*QUANTITIES, *MORE))
        ),
        *(
            Column(f"cosine_{name.rstrip('%')}", f"cosine, {name}", plain=_cosine(index))
            for name, index in SHOWN
        ),
    ]


def _number(value: float, digits: int) -> Cell:
    if not math.isfinite(value):
        return NOTHING
    return Cell(f"{value:.{digits}f}", Estimate(value, units=1))


def _of_layer(name: str, digits: int) -> Callable[[View, Row], Cell]:
    return lambda view, row: _number(
        over_heads(name, heads(view, name, row.where["layer"])), digits
    )


def _of_head(name: str, digits: int) -> Callable[[View, Row], Cell]:
    """The number of a query head; of keys that of the key head which it reads."""

    def cell(view: View, row: Row) -> Cell:
        layer, head = row.where["layer"], row.where["head"]
        values = heads(view, name, layer)
        if not len(values):
            return NOTHING
        shared = len(heads(view, "entropy", layer)) // len(values)
        return _number(float(values[head // shared]), digits)

    return cell


def _cosine_range(view: View, row: Row) -> Cell:
    """From the 5th to the 95th percentile, the mean over heads of each."""
    percentiles = cosines(view, row.where["layer"])
    low, high = (over_heads("cosine", percentiles[:, index]) for index in (1, 3))
    return Cell(f"{low:+z.2f} {high:+z.2f}") if math.isfinite(low) else NOTHING


def _cosine(index: int) -> Callable[[View, Row], Cell]:
    def cell(view: View, row: Row) -> Cell:
        percentiles = cosines(view, row.where["layer"])
        return (
            _number(float(percentiles[row.where["head"], index]), 2)
            if len(percentiles)
            else NOTHING
        )

    return cell


def _read(view: View) -> Sequence[str]:
    """What was read, by which model."""
    said = inspected(view).select("row", "method", "factor.texts", "train_length").row(0)
    score, method, texts, length = said
    return (f"{score}, {method or 'as is'}: {texts}, trained at {length:,}",)


PAGE = Page(
    title="What attention does",
    question="What do the layers and heads of a trained model attend to?",
    sources=(),
    tables=(
        Table(
            "table",
            "",
            _layer_rows,
            _layer_columns,
            notes=(
                "means over the heads of a layer and the queries of all texts, of largest logits "
                "the largest.",
                "entropy: of attention, in nats; / ln n: 0 looks at one key, 1 at all alike. "
                "largest: the largest logit of any visible pair.",
                "token 0, sink: attention to the first token, and to a learned sink. beyond L: to "
                "keys at i − j ≥ L, the training length. unseen: attention times the share of "
                "rotary feature pairs at an angle which training never had. ‖q‖, ‖k‖: norms as the "
                "projections give them.",
            ),
            head="layer",
        ),
        Table(
            "heads",
            "Every head",
            _head_rows,
            _head_columns,
            notes=(
                "norms of keys: those of the key head that a query head reads. Numbers by position "
                "are in measurements.parquet.",
            ),
            head="head",
        ),
    ),
    figures=figures,
    notes=_read,
)

"""What the reports of language models share: metrics, rows, columns and figures.

The words of the columns: *train length* is the accuracy at L, always of the unmodified model;
*non-repeated* natural text of the longest length; *repeated* a segment tiled to that length, *seen*
only the tokens whose answer stands earlier; *last segment* the same last L tokens after a context
of some length, *change* what the longest context adds to the shortest; *cost at L* what a method
changes at the training length when it is switched on there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import polars as pl

from normattn.lab.report.figures import (
    Curves,
    Figure,
    Grid,
    IntervalColumn,
    Intervals,
    Line,
    Mark,
    Panel,
    Point,
)
from normattn.lab.report.tables import Cell, Column, Row
from normattn.lab.report.view import View, bin_points, points, step_points
from normattn.lab.stats import LONGEST, SHORTEST, Metric
from normattn.lab.stats.arrays import Where

VARIANT_ORDER = (
    *("Baseline", "Baseline-logn", "QNA", "QNA-logn"),
    *("KNA", "KNA-logn", "CosA", "CosA-logn"),
)
FAMILIES = ("Baseline", "QNA", "KNA", "CosA")
"""The source's scores, each of one colour in all figures of these studies."""
METHOD_ORDER = ("", "NTK", "YaRN", "ReRoPE")
CONTROL = "StreamingLLM"
"""The method whose curve stands beside those of the unmodified models."""
TRAINED: Where = {"protocol": "train_length", "method": ""}
"""What was measured at the training length, as the row was trained."""
ACCURACY, LOSS, SEEN = Metric("accuracy"), Metric("loss"), Metric("accuracy_seen")
COPIED = Metric("accuracy_by_distance").at(protocol="repeated")
"""The same tokens as *seen*, by how far back the answer stands."""
LAST = ACCURACY.at(protocol="last_segment")
CHANGE = (LAST.at(LONGEST) - LAST.at(SHORTEST)).titled("change")
"""The last segment's accuracy after the longest context minus after the shortest, in points."""

LEGEND = (
    "train length: at the length the model was trained at, always without a method.",
    "repeated: a segment of text tiled to the whole context; seen: only the tokens whose answer "
    "stands earlier in the context.",
    "non-repeated: natural held-out text, every token scored.",
    "last segment: the same last training length of tokens after contexts of several lengths; "
    "change: what the longest context adds to the shortest, in points. More context must at "
    "least not hurt.",
    "cost at L: what a method changes at the training length when it is switched on there, in "
    "points.",
)
MAIN_COLUMNS = ("train", "non_repeated", "change", "cost")
"""The columns that a report shows first."""


def ranked(names: Iterable[str], order: Sequence[str]) -> list[str]:
    """Names of `order` first, the others by themselves."""
    position = {name: number for number, name in enumerate(order)}
    return sorted(names, key=lambda name: (position.get(name, len(position)), name))


def label(row: str, method: str) -> str:
    """How a row is called: "KNA-logn-YaRN"."""
    return "-".join(filter(None, (row, method)))


def row_of(row: str, method: str) -> Row:
    """The row of a trained score under a method."""
    return Row(label(row, method), {"row": row, "method": method})


def pairs_of(frame: pl.DataFrame, order: Sequence[str] = VARIANT_ORDER) -> list[tuple[str, str]]:
    """Every trained score and method of a frame, in the order of a table."""
    pairs = set(frame.select("row", "method").unique().rows())
    return [
        (row, method)
        for row in ranked({row for row, _ in pairs}, order)
        for method in ranked({method for name, method in pairs if name == row}, METHOD_ORDER)
    ]


def reading_rows(view: View) -> list[Row]:
    """A row for every trained score and method, unmodified first; diverged ones too."""
    measured = view.frame.filter(view.frame["protocol"] != "training")
    pairs = pairs_of(measured)
    methods = {method for _, method in pairs} or {""}
    ordered = []
    for row in ranked(view.values("row"), VARIANT_ORDER):
        own = {method for name, method in pairs if name == row}
        ordered += [(row, method) for method in ranked(own or methods, METHOD_ORDER)]
    return [row_of(*pair) for pair in ordered]


def past(metric: Metric, view: View, protocol: str, **place: Any) -> Metric:
    """A metric over the longest texts of a protocol that anything was read at."""
    return metric.at(protocol=protocol, length=view.longest(protocol), **place)


def reading_columns(view: View) -> list[Column]:
    """Every column that the protocols of this frame give, accuracies first, then losses."""
    lengths = view.lengths("last_segment")
    last = [Column(f"last_{n}", f"last segment after {n:,}", LAST.at(length=n)) for n in lengths]
    if len(lengths) > 1:
        change = LAST.at(length=lengths[-1]) - LAST.at(length=lengths[0])
        last.append(Column("change", "change", change))
    losses = [
        Column("train_loss", "loss at L", LOSS.at(TRAINED)),
        *_longest(view, "repeated_loss", "loss, repeated", LOSS, "repeated"),
        *_longest(view, "non_repeated_loss", "loss, non-repeated", LOSS, "non_repeated"),
    ]
    if lengths:
        after = LOSS.at(protocol="last_segment", length=lengths[-1])
        losses.append(Column("last_loss", "loss, last segment", after))
    return [
        Column("train", "train length", ACCURACY.at(TRAINED)),
        *_longest(view, "repeated", "repeated", ACCURACY, "repeated"),
        *_longest(view, "repeated_seen", "repeated, seen", SEEN, "repeated"),
        *_longest(view, "non_repeated", "non-repeated", ACCURACY, "non_repeated"),
        *last,
        Column("cost", "cost at L", plain=_cost),
        *losses,
    ]


def _longest(view: View, key: str, title: str, metric: Metric, protocol: str) -> list[Column]:
    length = view.longest(protocol)
    if length is None:
        return []
    return [Column(key, f"{title} ({length:,})", past(metric, view, protocol))]


def _cost(view: View, row: Row) -> Cell:
    """A method at L minus the unmodified model; nothing for the unmodified model."""
    if not row.where.get("method"):
        return Cell("–")
    at_l = ACCURACY.at(protocol="train_length")
    return Column("cost", "cost at L", at_l - at_l.at(method="")).cell(view, row)


def distances(view: View) -> list[int]:
    """How far back the answers stood in the longest tiled texts: one less than the segment."""
    where = {"protocol": "repeated", "length": view.longest("repeated")}
    return sorted(int(d) for d in view.values("bin", {**where, "statistic": COPIED.name}))


def copied_from(view: View, distance: int) -> Metric:
    """Accuracy on tokens whose answer stands so many tokens back in the longest tiled texts."""
    return past(COPIED, view, "repeated").between((float(distance), distance + 1.0))


def copying_columns(view: View) -> list[Column]:
    """Accuracy on tiled text by the distance over which a model has to copy."""
    return [
        Column(f"copied_{d}", f"copied over {d:,} tokens", copied_from(view, d))
        for d in distances(view)
    ]


def copying_figure(view: View) -> Figure:
    """Accuracy against the copying distance; distances that were trained are shaded."""
    trained = max(view.values("train_length", {"protocol": "repeated"}), default=None)
    methods = ranked(view.values("method", {"protocol": "repeated"}), METHOD_ORDER)

    def by_distance(at: Where) -> tuple[Point, ...]:
        return tuple(
            Point.of(float(d), estimate)
            for d in distances(view)
            if (estimate := view.known(copied_from(view, d).at(at))) is not None
        )

    panels = tuple(
        Panel(
            drawn[0] or "as is",
            _lines(view, {"protocol": "repeated"}, drawn, by_distance),
            *("copying distance (tokens)", "accuracy (%)", True),
            shaded=None if trained is None else float(trained),
        )
        for drawn in _panels(methods)
    )
    title = "Accuracy on tiled text by copying distance; shaded: distances that were trained"
    return Curves("accuracy_by_distance", title, panels, first=FAMILIES)


def in_short(view: View) -> list[str]:
    """How much longer context changes accuracy: Baseline, the best other score, the best method."""
    changes: dict[str, dict[str, float]] = {}
    for row, method in pairs_of(view.frame):
        estimate = view.estimate(CHANGE, {"row": row, "method": method})
        if estimate is not None:
            changes.setdefault(method, {})[row] = estimate.value
    unmodified = changes.get("", {})
    if not unmodified:
        return []
    lengths = view.lengths("last_segment")
    best = max(unmodified, key=lambda row: unmodified[row])
    named = [row for row in ("Baseline", best) if row in unmodified]
    values = ", ".join(f"{row} {unmodified[row]:+.1f}" for row in dict.fromkeys(named))
    sentences = [
        f"Change of accuracy when the context grows from {lengths[0]:,} to {lengths[-1]:,} tokens, "
        f"same final tokens, unmodified models, in points: {values}."
    ]
    rescued = {
        method: rows["Baseline"]
        for method, rows in changes.items()
        if method and method != CONTROL and "Baseline" in rows
    }
    if rescued:
        method = max(rescued, key=lambda name: rescued[name])
        sentences.append(
            f"With {method}, the best of {len(rescued)} methods here, Baseline changes by "
            f"{rescued[method]:+.1f}."
        )
    return sentences


def intervals(
    view: View,
    name: str,
    title: str,
    rows: Sequence[Row],
    columns: Sequence[Column],
    symlog: float | None = None,
) -> Figure:
    """The columns' numbers with their intervals; differences have a line at 0."""
    drawn = tuple(
        IntervalColumn(
            column.title,
            column.estimates(view, rows),
            zero=column.metric is not None and column.metric.is_difference,
        )
        for column in columns
    )
    return Intervals(name, title, tuple(row.label for row in rows), drawn, symlog)


def position_figures(view: View, methods: Sequence[str] | None = None) -> list[Figure]:
    """Accuracy by position on natural and on tiled text, a panel for every method."""
    figures: list[Figure] = []
    for protocol, title in (("non_repeated", "non-repeated"), ("repeated", "repeated")):
        length = view.longest(protocol)
        if length is None:
            continue
        shown = methods or ranked(view.values("method", {"protocol": protocol}), METHOD_ORDER)
        where = {"protocol": protocol, "length": length}
        mark = Mark(float(view.values("train_length", {"protocol": protocol})[0]), "L")
        panels = tuple(
            Panel(
                drawn[0] or "as is",
                _lines(view, where, drawn, lambda at: _by_position(view, at)),
                *("position", "accuracy (%)"),
                marks=(mark,),
            )
            for drawn in _panels(shown)
        )
        title = f"Accuracy by position, {title} text"
        figures.append(Curves(f"accuracy_by_position_{protocol}", title, panels, first=FAMILIES))
    return figures


def _panels(methods: Sequence[str]) -> list[tuple[str, ...]]:
    """The methods of every panel: one each, but for the control beside the unmodified models."""
    if not {"", CONTROL} <= set(methods):
        return [(method,) for method in methods]
    return [("", CONTROL), *((method,) for method in methods if method not in ("", CONTROL))]


def _lines(
    view: View,
    where: Where,
    methods: Sequence[str],
    plotted: Callable[[dict[str, Any]], tuple[Point, ...]],
) -> tuple[Line, ...]:
    """The curve of every row by every method of a panel; a control's has its own colour."""
    lines = []
    for method in methods:
        for row in ranked(view.values("row", {**where, "method": method}), VARIANT_ORDER):
            curve = plotted({**where, "row": row, "method": method})
            if not curve:
                continue
            if method == methods[0]:
                lines.append(Line(row, curve, family(row), row.endswith("-logn")))
            else:
                lines.append(Line(f"{row}-{method}", curve, method, dashed=True))
    return tuple(lines)


def _by_position(view: View, at: Where) -> tuple[Point, ...]:
    return bin_points(view, ACCURACY, at, lambda bin_: (bin_[2] + bin_[3]) / 2)


def family(row: str) -> str:
    """Rows that differ in log-n alone share a colour."""
    return row.removesuffix("-logn")


def length_figure(view: View) -> Figure:
    """The last segment's accuracy against the length of the context before and with it."""
    lengths = view.lengths("last_segment")
    methods = ranked(view.values("method", {"protocol": "last_segment"}), METHOD_ORDER)

    def by_length(at: Where) -> tuple[Point, ...]:
        return points(view, ACCURACY, ((n, {**at, "length": n}) for n in lengths))

    panels = tuple(
        Panel(
            drawn[0] or "as is",
            _lines(view, {"protocol": "last_segment"}, drawn, by_length),
            *("context (tokens)", "accuracy (%)", True),
        )
        for drawn in _panels(methods)
    )
    title = "The same last segment after longer contexts"
    return Curves("accuracy_by_length", title, panels, first=FAMILIES)


def table_figure(view: View) -> Figure:
    """The table as coloured cells."""
    rows = reading_rows(view)
    columns = [c for c in reading_columns(view) if c.metric and c.metric.unit == "%"]
    lines = [[column.cell(view, row).estimate for column in columns] for row in rows]
    return Grid(
        *("table", "Accuracy in %"),
        tuple(row.label for row in rows),
        tuple(column.title for column in columns),
        tuple(tuple(cell.value if cell else None for cell in line) for line in lines),
        tuple(tuple(f"{cell.value:.1f}" if cell else "" for cell in line) for line in lines),
        scale_title="accuracy (%)",
    )


def history_figure(view: View) -> Figure:
    """Training loss by step: the mean over the seeds of each row."""
    rows = view.values("row", {"protocol": "training", "axis": "step", "statistic": "loss"})
    lines = [
        Line(row, step_points(view, "loss", {"row": row}), family(row), row.endswith("-logn"))
        for row in ranked(rows, VARIANT_ORDER)
    ]
    panel = Panel("", tuple(lines), "training step", "training loss (nats per token)")
    title = "Training loss; bands: all seeds"
    return Curves("training_loss", title, (panel,), first=FAMILIES)

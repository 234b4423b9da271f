"""What the reports of language models share: metrics, rows, columns and figures.

The words of the columns: *train length* is the accuracy at L, always of the unmodified model;
*non-repeated* held-out text of the longest length; *repeated* a segment repeated to that length,
*seen* only the tokens whose answer occurs earlier; *last segment* the same last L tokens after a
context of some length, *change* what the longest context adds to the shortest; *cost at L* what a
method changes at the training length when it is switched on there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import polars as pl

from normattn.lab.report.figures import (
    Curves,
    Figure,
    IntervalColumn,
    Intervals,
    Line,
    Panel,
    Point,
)
from normattn.lab.report.tables import NOTHING, Cell, Column, Row, Table, shown
from normattn.lab.report.view import View, bin_points, points, step_points
from normattn.lab.stats import LONGEST, SHORTEST, Estimate, Metric
from normattn.lab.stats.arrays import Where
from normattn.lab.studies.preset import PROTOCOLS
from normattn.score.spec import UNMODIFIED

FAMILIES = ("Baseline", "QNA", "KNA", "CosA")
VARIANT_ORDER = tuple(f"{family}{logn}" for family in FAMILIES for logn in ("", "-logn"))
COLOUR_ORDER = tuple(f"{family}{logn}" for logn in ("", "-logn") for family in FAMILIES)
"""The source's scores, each of one colour in all figures of these studies."""
METHOD_ORDER = ("", "NTK", "YaRN", "ReRoPE")
CONTROL = "StreamingLLM"
"""The method whose curve is drawn with those of the unmodified models."""
TRAINED: Where = {"protocol": "train_length", "method": ""}
"""What was measured at the training length, as the row was trained."""
ACCURACY, LOSS, SEEN = Metric("accuracy"), Metric("loss"), Metric("accuracy_seen")
COPIED = Metric("accuracy_by_distance").at(protocol="repeated")
"""The same tokens as *seen*, by the distance of the answer."""
AT_L = ACCURACY.at(TRAINED)
LAST = ACCURACY.at(protocol="last_segment")
CHANGE = (LAST.at(LONGEST) - LAST.at(SHORTEST)).titled("change")
"""The last segment's accuracy after the longest context minus after the shortest, in points."""
UNMODIFIED_CHANGE = CHANGE.at(method="")

LEGEND = (
    "train length: always without a method. repeated: a segment of text, repeated to fill the "
    "context; seen: only the tokens whose answer occurs earlier.",
    "last segment: the same final tokens (one training length) after contexts of several lengths; "
    "change: accuracy after the longest context minus after the shortest, in points.",
    "cost at L: what a method changes at the training length, in points.",
)
MAIN_COLUMNS = ("train", "non_repeated", "change", "cost")
"""The columns that a report shows first."""

# Rows


def ranked(names: Iterable[str], order: Sequence[str]) -> list[str]:
    """Names of `order` first, the others by themselves."""
    return sorted(names, key=lambda name: _rank(name, order))


def _rank(name: str, order: Sequence[str]) -> tuple[int, str]:
    return (order.index(name) if name in order else len(order), name)


def row_of(row: str, method: str) -> Row:
    """The row of a trained score under a method, called as "KNA-logn-YaRN"."""
    return Row("-".join(filter(None, (row, method))), {"row": row, "method": method})


def rows_of(
    frame: pl.DataFrame,
    order: Sequence[str] = VARIANT_ORDER,
    methods: Sequence[str] = METHOD_ORDER,
) -> list[Row]:
    """A row for every trained score and method that was evaluated, in the order of tables."""
    pairs = frame.select("row", "method").unique().rows()
    pairs.sort(key=lambda pair: (_rank(pair[0], order), _rank(pair[1], methods)))
    return [row_of(*pair) for pair in pairs]


def reading_rows(view: View) -> list[Row]:
    """The same of the standard protocols, and each method's row of a score that was never read.

    None where only other protocols were read, which have tables of their own.
    """
    standard = view.read.filter(pl.col("protocol").is_in(PROTOCOLS))
    if view.read.height and not standard.height:
        return []
    read = [(row.where["row"], row.where["method"]) for row in rows_of(standard)]
    methods = {method for _, method in read} or {""}
    unread = set(view.values("row")) - {row for row, _ in read}
    pairs = [*read, *((row, method) for row in unread for method in methods)]
    pairs.sort(key=lambda pair: (_rank(pair[0], VARIANT_ORDER), _rank(pair[1], METHOD_ORDER)))
    return [row_of(*pair) for pair in pairs]


# Columns


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
    columns = [
        Column("train", "train length", AT_L),
        *_longest(view, "repeated", "repeated", ACCURACY, "repeated"),
        *_longest(view, "repeated_seen", "repeated, seen", SEEN, "repeated"),
        *_longest(view, "non_repeated", "non-repeated", ACCURACY, "non_repeated"),
        *last,
        Column("cost", "cost at L", plain=_cost),
        Column("train_loss", "loss at L", LOSS.at(TRAINED)),
        *_longest(view, "repeated_loss", "loss, repeated", LOSS, "repeated"),
        *_longest(view, "non_repeated_loss", "loss, non-repeated", LOSS, "non_repeated"),
    ]
    if lengths:
        after = LOSS.at(protocol="last_segment", length=lengths[-1])
        columns.append(Column("last_loss", "loss, last segment", after))
    return columns


def reading_table(key: str = "table", title: str = "", **more: Any) -> Table:
    """The table of everything that was read by the standard protocols."""
    intro = "Token accuracy in % (losses in nats) on held-out text."
    return Table(
        *(key, title, more.pop("rows", reading_rows), reading_columns),
        **{"intro": intro, "notes": LEGEND, **more},
    )


def _longest(view: View, key: str, title: str, metric: Metric, protocol: str) -> list[Column]:
    length = view.longest(protocol)
    if length is None:
        return []
    return [Column(key, f"{title} ({length:,})", past(metric, view, protocol))]


def _cost(view: View, row: Row) -> Cell:
    """A method at L minus the unmodified model; nothing for the unmodified model."""
    if not row.where.get("method"):
        return NOTHING
    at_l = ACCURACY.at(protocol="train_length")
    return Column("cost", "cost at L", at_l - at_l.at(method="")).cell(view, row)


def distances(view: View) -> list[int]:
    """How far back the answers are in the longest repeated texts: one less than the segment."""
    where = {"protocol": "repeated", "length": view.longest("repeated")}
    return sorted(int(d) for d in view.values("bin", {**where, "statistic": COPIED.name}))


def copied_from(view: View, distance: int) -> Metric:
    """Accuracy by the distance of the answer, in the longest repeated texts."""
    return past(COPIED, view, "repeated").between((float(distance), distance + 1.0))


def copying_columns(view: View) -> list[Column]:
    """Accuracy on repeated text by the distance over which a model has to copy."""
    return [
        Column(f"copied_{d}", f"copied over {d:,} tokens", copied_from(view, d))
        for d in distances(view)
    ]


def in_short(view: View) -> list[str]:
    """How much longer context changes accuracy: Baseline, the best other score, the best method."""
    changes: dict[str, dict[str, float]] = {}
    for row in rows_of(view.read):
        estimate = view.estimate(CHANGE, row.where)
        if estimate is not None:
            changes.setdefault(row.where["method"], {})[row.where["row"]] = estimate.value
    unmodified = changes.get("", {})
    if not unmodified:
        return []
    lengths = view.lengths("last_segment")
    others = {row: value for row, value in unmodified.items() if row != "Baseline"}
    named = ["Baseline"] if "Baseline" in unmodified else []
    named += [max(others, key=others.__getitem__)] if others else []
    values = ", ".join(f"{row} {unmodified[row]:+.1f}" for row in named)
    sentences = [
        f"Change of accuracy when the context grows from {lengths[0]:,} to {lengths[-1]:,} tokens, "
        f"same final tokens, unmodified models, in points: {values}."
    ]
    rescued = {
        method: rows["Baseline"]
        for method, rows in changes.items()
        if method not in ("", CONTROL) and "Baseline" in rows
    }
    if rescued:
        best = max(rescued, key=rescued.__getitem__)
        sentences.append(
            f"With {best}, the best of {len(rescued)} methods here, Baseline changes by "
            f"{rescued[best]:+.1f}."
        )
    return sentences


# Whether a comparison past L means something

EQUAL, COPIES = 1.0, 10.0
"""Points at L within which two scores count as equally good; points that repeated text must
be above held-out text for copying to count as learned. Set before the trainings of the preset
`workstation`, in development/log.md."""
LEAST_STEPS = 100
"""Models of fewer optimiser steps have learned nothing that could be lost past L."""


def precondition(view: View, rows: Sequence[str] | None = None) -> list[str]:
    """Whether the scores are equally good at L, and which of them copy at all.

    A difference past L is one of extrapolation only between models that are equally good at L, and
    a model that uses no far context has little to lose. Of `rows`, by default the source's scores:
    others are controls, which differ from Baseline by design. Nothing is said of models of fewer
    than `LEAST_STEPS` steps.
    """
    if max(view.values("sum", {"statistic": "steps"}), default=LEAST_STEPS) < LEAST_STEPS:
        return []
    trained = ranked(view.values("row", TRAINED), VARIANT_ORDER)
    source = [row for row in trained if row in VARIANT_ORDER]
    compared = source if len(source) > 1 else trained
    gaps = {row: view.estimate(AT_L.at(row=row) - AT_L.at(row="Baseline")) for row in compared}
    known = {row: gap for row, gap in gaps.items() if gap is not None}
    gains = {row: _copied(view, row) for row in rows or compared}
    learned = {row: gain >= COPIES for row, gain in gains.items() if gain is not None}
    sentences = []
    if known:
        values = ", ".join(f"{row} {shown(gap, 1, signed=True)}" for row, gap in known.items())
        sentences.append(
            f"{_equally_good([*known.values()])}. Accuracy at L minus Baseline's, in points: "
            f"{values}."
        )
    if learned:
        by = [row for row, does in learned.items() if does]
        whom = "every score" if all(learned.values()) else ", ".join(by) or "no score"
        sentences.append(
            f"Copying is learned by {whom}: in the second half of L, tokens whose answer occurs "
            f"earlier are predicted {COPIES:.0f} points better than held-out text, or more."
        )
    return sentences


def _equally_good(gaps: Sequence[Estimate]) -> str:
    ends = [(gap.low, gap.high) for gap in gaps]
    if all(low is not None and high is not None and max(-low, high) <= EQUAL for low, high in ends):
        return "The precondition is met: at L every other score is within a point of Baseline"
    if any((low or 0.0) > EQUAL or (high or 0.0) < -EQUAL for low, high in ends):
        return "The precondition is not met: the scores are not equally good at L"
    return "Whether the precondition is met is open: some may differ by over a point from Baseline"


def _copied(view: View, row: str) -> float | None:
    """Tokens of the second half of L whose answer is in the context, minus held-out text."""
    where = {"row": row, "method": ""}
    length = view.one("train_length", {**TRAINED, "row": row}) or 0
    within = (float(length // 2), float(length))  # the shortest segment has half as many
    tiled = view.known(past(SEEN, view, "repeated", **where).between(within))
    natural = view.known(past(ACCURACY, view, "non_repeated", **where).between(within))
    return None if tiled is None or natural is None else tiled.value - natural.value


# Figures


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


def _by_method(
    view: View,
    name: str,
    title: str,
    where: Where,
    curve: Callable[[dict[str, Any]], tuple[Point, ...]],
    x_title: str,
    **axes: Any,
) -> Figure:
    """A curve of every row, a panel for each method.

    The control's curves, dashed, are drawn with those of the unmodified models.
    """
    methods = ranked(view.values("method", where), METHOD_ORDER)
    beside = (CONTROL,) if {"", CONTROL} <= set(methods) else ()
    panels = []
    for method in methods:
        if method in beside:
            continue
        lines = []
        for read in (method, *(beside if not method else ())):
            for row in ranked(view.values("row", {**where, "method": read}), VARIANT_ORDER):
                drawn = curve({**where, "row": row, "method": read})
                if drawn:
                    label = row if read == method else row_of(row, read).label
                    lines.append(Line(label, drawn, row, dashed=read != method))
        panels.append(Panel(method or UNMODIFIED, tuple(lines), x_title, "accuracy (%)", **axes))
    return Curves(name, title, tuple(panels), first=COLOUR_ORDER)


def position_figures(view: View) -> list[Figure]:
    """Accuracy by position on held-out and on repeated text, a panel for every method."""

    def curve(at: Where) -> tuple[Point, ...]:
        return bin_points(view, ACCURACY, at, lambda bin_: (bin_[2] + bin_[3]) / 2)

    figures = []
    for protocol, text in (("non_repeated", "non-repeated"), ("repeated", "repeated")):
        length = view.longest(protocol)
        if length is None:
            continue
        where = {"protocol": protocol, "length": length}
        axes = {"train_length": view.values("train_length", where)[0]}
        name, title = f"accuracy_by_position_{protocol}", f"Accuracy by position, {text} text"
        figures.append(_by_method(view, name, title, where, curve, "position", **axes))
    return figures


def length_figure(view: View) -> Figure:
    """The last segment's accuracy against the length of the context before and with it."""
    lengths = view.lengths("last_segment")
    title = "The same last segment after longer contexts"

    def curve(at: dict[str, Any]) -> tuple[Point, ...]:
        return points(view, ACCURACY, ((n, {**at, "length": n}) for n in lengths))

    where = {"protocol": "last_segment"}
    name, x_title = "accuracy_by_length", "context (tokens)"
    return _by_method(view, name, title, where, curve, x_title, log_x=True)


def copying_figure(view: View) -> Figure:
    """Accuracy against the copying distance; those up to L were trained."""
    trained = max(view.values("train_length", {"protocol": "repeated"}), default=None)
    metrics = {d: copied_from(view, d) for d in distances(view)}
    title = "Accuracy on repeated text by copying distance; those up to L were trained"

    def curve(at: dict[str, Any]) -> tuple[Point, ...]:
        known = ((d, view.known(metric.at(at))) for d, metric in metrics.items())
        return tuple(Point.of(float(d), value) for d, value in known if value is not None)

    where, x_title = {"protocol": "repeated"}, "copying distance (tokens)"
    axes: dict[str, Any] = {"log_x": True, "train_length": trained}
    return _by_method(view, "accuracy_by_distance", title, where, curve, x_title, **axes)


def history_figure(view: View) -> Figure:
    """Training loss by step: the mean over the seeds of each row."""
    where = {"protocol": "training", "axis": "step", "statistic": "loss"}
    rows = ranked(view.values("row", where), VARIANT_ORDER)
    lines = tuple(Line(row, step_points(view, "loss", {"row": row})) for row in rows)
    panel = Panel("", lines, "training step", "training loss (nats per token)")
    title = "Training loss; bands: all seeds"
    return Curves("training_loss", title, (panel,), first=COLOUR_ORDER)

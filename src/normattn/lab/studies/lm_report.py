"""Metrics, rows, columns and figures that the reports of language models share.

The columns show token accuracy and loss, L being the training length:

- *at the training length*: on texts of L tokens, always of the unmodified model;
- *held-out text*: on texts of the longest length;
- *repeated text*: a segment repeated to that length; *seen*: only answers that occur earlier;
- *same final tokens*: the last L tokens of a text, after contexts of several lengths;
- *change*: the same final tokens after the longest context minus after the shortest;
- *cost on short text*: what a method changes at the training length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from math import inf
from typing import Any, Literal

import polars as pl

from normattn.lab.evaluation.masked import learnt_nothing
from normattn.lab.report.figures import (
    Curves,
    Figure,
    IntervalColumn,
    Intervals,
    Line,
    Panel,
    Point,
)
from normattn.lab.report.tables import EMPTY_CELL, Cell, Column, Row, Table, format_estimate
from normattn.lab.report.view import View, bin_points, points, step_points
from normattn.lab.stats import LONGEST, SHORTEST, Estimate, Metric
from normattn.lab.stats.arrays import Where
from normattn.lab.studies.preset import PROTOCOLS
from normattn.score.spec import UNMODIFIED

FAMILIES = ("Baseline", "QNA", "KNA", "CosA")
VARIANT_ORDER = tuple(f"{family}{logn}" for family in FAMILIES for logn in ("", "-logn"))
COLOUR_ORDER = tuple(f"{family}{logn}" for logn in ("", "-logn") for family in FAMILIES)
"""The source's scores, which have the same colours in all figures of these studies."""
METHOD_ORDER = ("", "NTK", "YaRN", "ReRoPE")
CONTROL = "StreamingLLM"
"""The method that is drawn with the unmodified models: it cannot see beyond its window."""
TRAINED: Where = {"protocol": "train_length", "method": ""}
"""The measurements at the training length, without a method."""
ACCURACY, LOSS, SEEN = Metric("accuracy"), Metric("loss"), Metric("accuracy_seen")
COPIED = Metric("accuracy_by_distance").at(protocol="repeated")
"""The same tokens as *seen*, by the distance of the answer."""
AT_L = ACCURACY.at(TRAINED)
LAST = ACCURACY.at(protocol="last_segment")
CHANGE = LAST.at(LONGEST) - LAST.at(SHORTEST)
"""Accuracy on the same final tokens after the longest context minus after the shortest."""
UNMODIFIED_CHANGE = CHANGE.at(method="")
_LAST_LOSS = LOSS.at(protocol="last_segment", method="")
LOSS_CHANGE = _LAST_LOSS.at(LONGEST) - _LAST_LOSS.at(SHORTEST)
"""The same for the loss, of unmodified models."""

LEGEND = (
    "At the training length: always without a method. Repeated text: a segment, repeated to fill "
    "the context; seen: only the tokens whose answer occurs earlier.",
    "Same final tokens: as many as the training length, after contexts of several lengths. "
    "Change: accuracy after the longest context minus after the shortest, in points.",
    "Cost on short text: what a method changes at the training length, in points.",
)
COST = "cost on short text"
TEXTS = {
    "train_length": "at the training length",
    "non_repeated": "held-out text",
    "repeated": "repeated text",
    "last_segment": "same final tokens",
}
"""The title of each protocol."""

# Rows


def ranked(names: Iterable[str], order: Sequence[str]) -> list[str]:
    """Names sorted as in `order`, then the others alphabetically."""
    return sorted(names, key=lambda name: _rank(name, order))


def _rank(name: str, order: Sequence[str]) -> tuple[int, str]:
    return (order.index(name) if name in order else len(order), name)


def row_of(row: str, method: str) -> Row:
    """The row of a trained score under a method, such as "KNA-logn-YaRN"."""
    return Row("-".join(filter(None, (row, method))), {"row": row, "method": method})


def rows_of(
    frame: pl.DataFrame,
    order: Sequence[str] = VARIANT_ORDER,
    methods: Sequence[str] = METHOD_ORDER,
    more: Iterable[tuple[str, str]] = (),
) -> list[Row]:
    """A row for each trained score and method that was evaluated, and for the pairs `more`."""
    pairs = [*frame.select("row", "method").unique().rows(), *more]
    pairs.sort(key=lambda pair: (_rank(pair[0], order), _rank(pair[1], methods)))
    return [row_of(*pair) for pair in pairs]


def protocol_rows(view: View) -> list[Row]:
    """The rows of the standard protocols; a score that was not evaluated has a row per method.

    Empty where only other protocols were evaluated, which have separate tables.
    """
    standard = view.evaluated.filter(pl.col("protocol").is_in(PROTOCOLS))
    if view.evaluated.height and not standard.height:
        return []
    unevaluated = set(view.values("row")) - set(standard["row"])
    methods = standard["method"].unique().to_list() or [""]
    return rows_of(standard, more=product(unevaluated, methods))


# Columns


def at_longest(metric: Metric, view: View, protocol: str, **where: Any) -> Metric:
    """The metric on the longest texts of a protocol."""
    return metric.at(protocol=protocol, length=view.longest(protocol), **where)


def protocol_columns(view: View) -> list[Column]:
    """All columns of the standard protocols, accuracies first, then losses."""

    def longest(key: str, title: str, metric: Metric, protocol: str) -> list[Column]:
        length = view.longest(protocol)
        if length is None:
            return []
        return [Column(key, f"{title} ({length:,})", at_longest(metric, view, protocol))]

    lengths = view.lengths("last_segment")
    last = {n: LAST.at(length=n) for n in lengths}
    changes = [last[n] - last[lengths[0]] for n in lengths[1:]]
    losses = [LOSS.at(protocol="last_segment", length=n) for n in lengths]
    return [
        Column("train", "at the training length", AT_L),
        *longest("repeated", "repeated text", ACCURACY, "repeated"),
        *longest("repeated_seen", "repeated text, seen", SEEN, "repeated"),
        *longest("non_repeated", "held-out text", ACCURACY, "non_repeated"),
        *(Column(f"last_{n}", f"same final tokens after {n:,}", last[n]) for n in lengths),
        *(Column("change", "change", change) for change in changes[-1:]),
        Column("cost", COST, plain=_cost),
        Column("train_loss", "loss at the training length", LOSS.at(TRAINED)),
        *longest("repeated_loss", "loss, repeated text", LOSS, "repeated"),
        *longest("non_repeated_loss", "loss, held-out text", LOSS, "non_repeated"),
        *(Column("last_loss", "loss, same final tokens", loss) for loss in losses[-1:]),
    ]


def protocol_table(key: str = "table", title: str = "", **options: Any) -> Table:
    """The table of the standard protocols; `options` are fields of `Table`."""
    defaults = {
        "rows": protocol_rows,
        "columns": protocol_columns,
        "intro": "Token accuracy in % (losses in nats) on held-out text.",
        "notes": LEGEND,
    }
    return Table(key, title, **{**defaults, **options})


def _cost(view: View, row: Row) -> Cell:
    """A method minus the unmodified model at the training length; empty for the latter."""
    if not row.where.get("method"):
        return EMPTY_CELL
    at_l = ACCURACY.at(protocol="train_length")
    return Column("cost", COST, at_l - at_l.at(method="")).cell(view, row)


def distances(view: View) -> list[int]:
    """The copying distances of the longest repeated texts: the segment's length minus one."""
    where = {"protocol": "repeated", "length": view.longest("repeated")}
    return sorted(int(d) for d in view.values("bin", {**where, "statistic": COPIED.name}))


def copied_from(view: View, distance: int) -> Metric:
    """The accuracy of copying over a distance, in the longest repeated texts."""
    return at_longest(COPIED, view, "repeated").between((float(distance), distance + 1.0))


def in_short(view: View) -> list[str]:
    """How much longer context changes accuracy: Baseline, KNA, the best scores, the best method.

    The best of the source's scores and of all others are those whose intervals begin highest: seeds
    that differ widely are no lead. A trained window, which has no distant context, is left out.
    """
    changes: dict[str, dict[str, Estimate]] = {}
    for row in rows_of(view.evaluated):
        estimate = view.estimate(CHANGE, row.where)
        if estimate is not None:
            changes.setdefault(row.where["method"], {})[row.where["row"]] = estimate
    unmodified = changes.get("", {})
    if not unmodified:
        return []
    lengths = view.lengths("last_segment")
    lower = {row: e.value if e.low is None else e.low for row, e in unmodified.items()}
    scores = [row for row in lower if row in VARIANT_ORDER and row != "Baseline"]
    others = [row for row in lower if row not in VARIANT_ORDER and "SlidingWindow" not in row]
    best_rows = [max(rows, key=lower.__getitem__) for rows in (scores, others) if rows]
    reported = list(dict.fromkeys([*(r for r in ("Baseline", "KNA") if r in lower), *best_rows]))
    values = ", ".join(f"{row} {unmodified[row].value:+.1f}" for row in reported)
    sentences = [
        f"Change of accuracy when the context grows from {lengths[0]:,} to {lengths[-1]:,} tokens, "
        f"same final tokens, unmodified models, in points: {values}."
    ]
    rescued = {
        method: rows["Baseline"].value
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


# The precondition of comparing scores on longer text

EQUAL, COPIES = 1.0, 10.0
"""Points at L within which two scores are equally good, and points by which accuracy on repeated
text must exceed that on held-out text for copying to be learned. Both were set in
development/log.md before the preset `workstation` was trained."""


def precondition(view: View, rows: Sequence[str] | None = None) -> list[str]:
    """Sentences on whether the scores are equally good at L, and which of them learned to copy.

    A difference on longer text shows extrapolation only between models that are equally good at L,
    and a model that ignores distant context has little to lose. `rows` are checked for copying
    (default: the source's scores, as others are controls that differ by design).
    """
    trained = ranked(view.values("row", TRAINED), VARIANT_ORDER)
    source = [row for row in trained if row in VARIANT_ORDER]
    compared = source if len(source) > 1 else trained
    gaps = {row: view.estimate(AT_L.at(row=row) - AT_L.at(row="Baseline")) for row in compared}
    measured = {row: gap for row, gap in gaps.items() if gap is not None}
    gains = {row: _copying_gain(view, row) for row in rows or compared}
    learned = {row: gain >= COPIES for row, gain in gains.items() if gain is not None}
    sentences = []
    if measured:
        ends = [
            (-inf if gap.low is None else gap.low, inf if gap.high is None else gap.high)
            for gap in measured.values()
        ]
        if all(low >= -EQUAL and high <= EQUAL for low, high in ends):
            verdict = "met: all scores are within a point of Baseline"
        elif any(low > EQUAL or high < -EQUAL for low, high in ends):
            verdict = "not met: some scores differ by over a point from Baseline"
        else:
            verdict = "undecided: some scores may differ by over a point from Baseline"
        values = [f"{row} {format_estimate(gap, 1, signed=True)}" for row, gap in measured.items()]
        sentences.append(
            f"The precondition is {verdict}. Accuracy at the training length minus Baseline's, in "
            f"points: {', '.join(values)}."
        )
    if learned:
        learners = [row for row, copies in learned.items() if copies]
        whom = "every score" if all(learned.values()) else ", ".join(learners) or "no score"
        sentences.append(
            f"Copying is learned by {whom}: in the second half of the training length, tokens "
            f"whose answer occurs earlier are predicted at least {COPIES:.0f} points better than "
            "held-out text."
        )
    return sentences


def _copying_gain(view: View, row: str) -> float | None:
    """Accuracy on repeated minus held-out text, in the second half of the training length."""
    length = view.only_value("train_length", {**TRAINED, "row": row}) or 0
    within = (float(length // 2), float(length))  # the shortest segment has half as many
    repeated, held_out = (
        view.finite_estimate(at_longest(metric, view, text, row=row, method="").between(within))
        for metric, text in ((SEEN, "repeated"), (ACCURACY, "non_repeated"))
    )
    return None if repeated is None or held_out is None else repeated.value - held_out.value


# How trainings ended, where a study tests which settings fail

TrainingOutcome = Literal["diverged", "stuck", "learned"]
"""From the worst to the best: its loss is no longer finite; it learned nothing from the context, as
it is less than `MARGIN` nats better than the unigram model; neither."""


def training_outcomes(view: View, where: Where) -> dict[int, TrainingOutcome]:
    """How the training of each seed ended, in the rows `where`; empty where none was measured.

    Each seed is judged alone, as a mean would hide one that learned nothing.
    """
    outcomes: dict[int, TrainingOutcome] = {}
    losses, unigrams = (view.sums(name, where) for name in ("loss", "unigram_loss"))
    if losses is not None and unigrams is not None:
        by_seed = (
            (sums.numerator.sum((1, 2)) / sums.denominator.sum((1, 2))).tolist()
            for sums in (losses, unigrams)
        )
        for seed, loss, unigram in zip(losses.seeds, *by_seed, strict=True):
            outcomes[seed] = "stuck" if learnt_nothing(loss, unigram) else "learned"
    diverged = view.values("seed", {**where, "protocol": "training", "statistic": "diverged"})
    return outcomes | dict.fromkeys(sorted(diverged), "diverged")


# Figures


def interval_figure(
    view: View,
    name: str,
    title: str,
    rows: Sequence[Row],
    columns: Sequence[Column],
    symlog: float | None = None,
) -> Figure:
    """A figure of the columns' values with their intervals; differences have a line at 0."""
    drawn = []
    for column in columns:
        zero = column.metric is not None and column.metric.is_difference
        drawn.append(IntervalColumn(column.title, column.estimates(view, rows), zero))
    return Intervals(name, title, tuple(row.label for row in rows), tuple(drawn), symlog)


def _by_method(
    view: View,
    name: str,
    title: str,
    where: Where,
    curve: Callable[[dict[str, Any]], tuple[Point, ...]],
    x_title: str,
    **axes: Any,
) -> Figure:
    """A panel for each method, with a curve for each row.

    The panel of the unmodified models shows the first row under the control too, dashed.
    """
    methods = ranked(view.values("method", where), METHOD_ORDER)
    has_control = {"", CONTROL} <= set(methods)
    panels = []
    for method in methods:
        if has_control and method == CONTROL:
            continue
        rows = ranked(view.values("row", {**where, "method": method}), VARIANT_ORDER)
        drawn = [(row, method) for row in rows]
        if has_control and not method:
            controlled = view.values("row", {**where, "method": CONTROL})
            drawn.append((ranked(controlled, VARIANT_ORDER)[0], CONTROL))
        lines = []
        for row, applied in drawn:
            plotted = curve({**where, "row": row, "method": applied})
            if plotted:
                label = row if applied == method else row_of(row, applied).label
                lines.append(Line(label, plotted, row, control=applied != method))
        panels.append(Panel(method or UNMODIFIED, tuple(lines), x_title, "accuracy (%)", **axes))
    return Curves(name, title, tuple(panels), first=COLOUR_ORDER, featured=("KNA",))


def position_figures(view: View) -> list[Figure]:
    """Accuracy by position on held-out and on repeated text, a panel for each method."""

    def curve(row: Where) -> tuple[Point, ...]:
        return bin_points(view, ACCURACY, row, lambda bin_: (bin_[2] + bin_[3]) / 2)

    figures = []
    for protocol in ("non_repeated", "repeated"):
        length = view.longest(protocol)
        if length is None:
            continue
        where = {"protocol": protocol, "length": length}
        axes = {"train_length": view.values("train_length", where)[0]}
        name, title = f"accuracy_by_position_{protocol}", f"Accuracy by position, {TEXTS[protocol]}"
        figures.append(_by_method(view, name, title, where, curve, "position (tokens)", **axes))
    return figures


def methods_by_position(view: View, name: str, title: str, where: Where) -> Figure:
    """Loss and accuracy by position, a line for each method of the rows `where`.

    Methods that differ in log-n only share a colour.
    """
    where = {**where, "protocol": "by_position"}
    panels = []
    for metric, unit in ((LOSS, "nats"), (ACCURACY, "accuracy (%)")):
        lines = []
        for method in ranked(view.values("method", where), METHOD_ORDER):
            plotted = bin_points(view, metric, {**where, "method": method}, lambda bin_: bin_[3])
            family = method.removesuffix("-logn+") or UNMODIFIED
            if plotted:
                dashed, control = method not in ("", family), method == CONTROL
                lines.append(Line(method or UNMODIFIED, plotted, family, dashed, control))
        length = view.only_value("train_length", where)
        axes: dict[str, Any] = {"log_x": True, "train_length": length}
        panels.append(Panel(metric.title, tuple(lines), "position (tokens)", unit, **axes))
    return Curves(name, title, tuple(panels), shared_y=False)


def length_figure(view: View) -> Figure:
    """Accuracy on the same final tokens against the length of the context."""
    metrics = {n: ACCURACY.at(length=n) for n in view.lengths("last_segment")}
    title = "Accuracy on the same final tokens after longer contexts"
    where, x_title = {"protocol": "last_segment"}, "context (tokens)"
    curve = partial(_curve, view, metrics)
    return _by_method(view, "accuracy_by_length", title, where, curve, x_title, log_x=True)


def copying_figure(view: View) -> Figure:
    """Accuracy against the copying distance."""
    metrics = {distance: copied_from(view, distance) for distance in distances(view)}
    title = "Accuracy on repeated text by copying distance (trained: up to the training length)"
    where, x_title = {"protocol": "repeated"}, "copying distance (tokens)"
    trained = max(view.values("train_length", where), default=None)
    axes: dict[str, Any] = {"log_x": True, "train_length": trained}
    curve = partial(_curve, view, metrics)
    return _by_method(view, "accuracy_by_distance", title, where, curve, x_title, **axes)


def _curve(view: View, metrics: Mapping[int, Metric], row: Where) -> tuple[Point, ...]:
    return points(view, ((x, metric.at(row)) for x, metric in metrics.items()))


def history_figure(view: View) -> Figure:
    """Training loss by step: the mean over the seeds of each row."""
    where = {"protocol": "training", "axis": "step", "statistic": "loss"}
    rows = ranked(view.values("row", where), VARIANT_ORDER)
    lines = tuple(Line(row, step_points(view, "loss", {"row": row})) for row in rows)
    panel = Panel("", lines, "training step", "training loss (nats)")
    title = "Training loss; bands: all seeds"
    return Curves("training_loss", title, (panel,), first=COLOUR_ORDER)

"""What the studies of reading past the training length show: columns, rows, figures.

The words of the columns: *train length* is the accuracy at L, always of the model as it is;
*non-repeated* natural text of the longest length; *repeated* a segment tiled to that length, *seen*
only the tokens whose answer stands earlier; *last segment* the same last L tokens after a context
of some length, *change* what the longest context adds to the shortest; *cost at L* what a method
changes at the training length when it is switched on there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import polars as pl

from normattn.lab.report.figure import Curves, Figure, Grid, Line, Mark, Panel, Point
from normattn.lab.report.points import bin_points, points
from normattn.lab.report.table import NOTHING, Cell, Column, Row
from normattn.lab.report.view import Term, View
from normattn.lab.stats import select
from normattn.lab.stats.arrays import Where
from normattn.lab.stats.metrics import Statistic, accuracy, loss

VARIANT_ORDER = (
    *("Baseline", "Baseline-logn", "QNA", "QNA-logn"),
    *("KNA", "KNA-logn", "CosA", "CosA-logn"),
)
FAMILIES = ("Baseline", "QNA", "KNA", "CosA")
"""The source's scores, each of one colour in all figures of these studies."""
METHOD_ORDER = ("", "NTK", "YaRN", "ReRoPE")
CONTROL = "StreamingLLM"
"""The method whose curve stands beside those of the models as they are."""
TRAINED: Where = {"protocol": "train_length", "method": ""}
"""What was measured at the training length, as the row was trained."""
ACCURACY, LOSS = accuracy(), loss()
SEEN = accuracy("seen", "accuracy_seen")
POINTS = Statistic(ACCURACY.name, "accuracy", ACCURACY.value, "points", 1)

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


def longest(view: View, protocol: str) -> int | None:
    """The longest length that a protocol was read at."""
    return max(view.values("length", {"protocol": protocol}), default=None)


def change_terms(view: View, where: Where, factor: float = 1.0) -> tuple[Term, ...]:
    """The last segment's accuracy after the longest context minus after the shortest.

    No terms where it was read after one length only.
    """
    at = {**where, "protocol": "last_segment"}
    lengths = sorted(view.values("length", at))
    if len(lengths) < 2:
        return ()
    ends = ((factor, lengths[-1]), (-factor, lengths[0]))
    return tuple(Term(sign, {**at, "length": length}) for sign, length in ends)


def minus(ours: Sequence[Term], theirs: Sequence[Term]) -> tuple[Term, ...]:
    """What `ours` say minus what `theirs` do; no terms where one of them has none."""
    if not (ours and theirs):
        return ()
    return (*ours, *(Term(-term.factor, term.where, term.bins) for term in theirs))


def whole_cell(view: View, statistic: Statistic, terms: Sequence[Term], signed: bool) -> Cell:
    """A cell of terms that say all of where they are: no row's own place is laid under them."""
    if not terms:
        return NOTHING
    overlay = tuple((term.factor, term.where) for term in terms)
    return Column("", "", statistic, overlay, signed=signed).cell(view, Row("", {}))


def ranked(names: Iterable[str], order: Sequence[str]) -> list[str]:
    """Names of `order` first, the others by themselves."""
    position = {name: number for number, name in enumerate(order)}
    return sorted(names, key=lambda name: (position.get(name, len(position)), name))


def reading_rows(view: View) -> list[Row]:
    """A row for every trained score and method, as they are first; diverged ones too."""
    measured = view.frame.filter(view.frame["protocol"] != "training")
    pairs = pairs_of(measured)
    methods = {method for _, method in pairs} or {""}
    ordered = []
    for row in ranked(view.values("row"), VARIANT_ORDER):
        own = {method for name, method in pairs if name == row}
        ordered += [(row, method) for method in ranked(own or methods, METHOD_ORDER)]
    return [row_of(*pair) for pair in ordered]


def pairs_of(frame: pl.DataFrame) -> list[tuple[str, str]]:
    """Every trained score and method of a frame, in the order of a table."""
    pairs = set(frame.select("row", "method").unique().rows())
    return [
        (row, method)
        for row in ranked({row for row, _ in pairs}, VARIANT_ORDER)
        for method in ranked({method for name, method in pairs if name == row}, METHOD_ORDER)
    ]


def row_of(row: str, method: str) -> Row:
    """The row of a trained score under a method."""
    return Row(label(row, method), {"row": row, "method": method})


def label(row: str, method: str) -> str:
    """How a row is called: "KNA-logn-YaRN"."""
    return "-".join(filter(None, (row, method)))


def reading_columns(view: View) -> list[Column]:
    """Every column that the protocols of this frame give, accuracies first, then losses."""
    lengths = sorted(view.values("length", {"protocol": "last_segment"}))
    columns = [
        Column("train", "train length", ACCURACY, ((1.0, _at("train_length", method="")),)),
        *_protocol("repeated", "repeated", view, ACCURACY),
        *_protocol("repeated_seen", "repeated, seen", view, SEEN),
        *_protocol("non_repeated", "non-repeated", view, ACCURACY),
        *(
            Column(
                f"last_{n}", f"last segment after {n:,}", ACCURACY, ((1.0, _at("last_segment", n)),)
            )
            for n in lengths
        ),
    ]
    if len(lengths) > 1:
        ends = ((1.0, _at("last_segment", lengths[-1])), (-1.0, _at("last_segment", lengths[0])))
        columns.append(Column("change", "change", POINTS, ends, signed=True))
    columns.append(Column("cost", "cost at L", plain=_cost))
    columns.append(
        Column("train_loss", "loss at L", LOSS, ((1.0, _at("train_length", method="")),))
    )
    columns += _protocol("repeated_loss", "loss, repeated", view, LOSS)
    columns += _protocol("non_repeated_loss", "loss, non-repeated", view, LOSS)
    if lengths:
        last = ((1.0, _at("last_segment", lengths[-1])),)
        columns.append(Column("last_loss", "loss, last segment", LOSS, last))
    return columns


def _at(protocol: str, length: int | None = None, **more: Any) -> dict[str, Any]:
    return {"protocol": protocol, **({} if length is None else {"length": length}), **more}


def _protocol(key: str, title: str, view: View, statistic: Statistic) -> list[Column]:
    protocol = key.removesuffix("_loss").removesuffix("_seen")
    length = longest(view, protocol)
    if length is None:
        return []
    return [Column(key, f"{title} ({length:,})", statistic, ((1.0, _at(protocol, length)),))]


def _cost(view: View, row: Row) -> Cell:
    """A method at L minus the model as it is; nothing for the model as it is."""
    if not row.where.get("method"):
        return Cell("–")
    terms = ((1.0, _at("train_length")), (-1.0, _at("train_length", method="")))
    return Column("cost", "cost at L", POINTS, terms, signed=True).cell(view, row)


def in_short(view: View) -> list[str]:
    """How much longer context changes accuracy: Baseline, the best other score, the best method."""
    changes: dict[str, dict[str, float]] = {}
    for row, method in pairs_of(view.frame):
        terms = change_terms(view, {"row": row, "method": method})
        estimate = view.contrast(POINTS, terms) if terms else None
        if estimate is not None:
            changes.setdefault(method, {})[row] = estimate.value
    unmodified = changes.get("", {})
    if not unmodified:
        return []
    lengths = sorted(view.values("length", {"protocol": "last_segment"}))
    sentences = []
    best = max(unmodified, key=lambda row: unmodified[row])
    named = [row for row in ("Baseline", best) if row in unmodified]
    values = ", ".join(f"{row} {unmodified[row]:+.1f}" for row in dict.fromkeys(named))
    sentences.append(
        f"Change of accuracy when the context grows from {lengths[0]:,} to {lengths[-1]:,} tokens, "
        f"same final tokens, unmodified models, in points: {values}."
    )
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


MAIN_COLUMNS = ("train", "non_repeated", "change", "cost")
"""The columns that a report shows first."""


def position_figures(view: View, methods: Sequence[str] | None = None) -> list[Figure]:
    """Accuracy by position on natural and on tiled text, a panel for every method."""
    curves: list[Figure] = []
    for protocol, title in (("non_repeated", "non-repeated"), ("repeated", "repeated")):
        length = longest(view, protocol)
        if length is None:
            continue
        shown = methods or ranked(view.values("method", {"protocol": protocol}), METHOD_ORDER)
        where = {"protocol": protocol, "length": length}
        panels = tuple(
            Panel(
                drawn[0] or "as is",
                _lines(view, where, drawn, lambda at: _by_position(view, at)),
                "position",
                "accuracy (%)",
                marks=(Mark(float(view.values("train_length", {"protocol": protocol})[0]), "L"),),
            )
            for drawn in _panels(shown)
        )
        curves.append(
            Curves(
                f"accuracy_by_position_{protocol}",
                f"Accuracy by position, {title} text",
                panels,
                first=FAMILIES,
            )
        )
    return curves


def _panels(methods: Sequence[str]) -> list[tuple[str, ...]]:
    """The methods of every panel: one each, but for the control beside the models as they are."""
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
    methods = ranked(view.values("method", {"protocol": "last_segment"}), METHOD_ORDER)
    lengths = sorted(view.values("length", {"protocol": "last_segment"}))

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
    columns = [c for c in reading_columns(view) if c.statistic and c.statistic.unit == "%"]
    cells = [[column.cell(view, row) for column in columns] for row in rows]
    return Grid(
        "table",
        "Accuracy in %",
        tuple(row.label for row in rows),
        tuple(column.title for column in columns),
        tuple(tuple(c.estimate.value if c.estimate else None for c in line) for line in cells),
        tuple(
            tuple(f"{c.estimate.value:.1f}" if c.estimate else "" for c in line) for line in cells
        ),
        scale_title="accuracy (%)",
    )


def history_figure(view: View) -> Figure:
    """Training loss by step: the mean over the seeds of each row."""
    rows = view.values("row", {"protocol": "training", "axis": "step", "statistic": "loss"})
    lines = [
        Line(row, loss_points(view, {"row": row}), family(row), row.endswith("-logn"))
        for row in ranked(rows, VARIANT_ORDER)
    ]
    panel = Panel("", tuple(lines), "training step", "training loss (nats per token)")
    title = "Training loss; bands: all seeds"
    return Curves("training_loss", title, (panel,), first=FAMILIES)


def loss_points(view: View, where: Where) -> tuple[Point, ...]:
    """The training loss of some row by step: the mean over its seeds, the lowest, the highest."""
    return step_points(view, "loss", where)


def step_points(view: View, statistic: str, where: Where) -> tuple[Point, ...]:
    """What a training recorded, by step: the mean of the seeds that came so far, and their range.

    `where` chooses the trainings of one row; it may name another protocol than "training".
    """
    per_step: dict[float, list[float]] = {}
    training = {"protocol": "training", "axis": "step", "statistic": statistic}
    chosen = select(view.frame, {**training, **where})
    for start, above, below in chosen.sort("bin", "seed").select("bin", "sum", "of").rows():
        if below:
            per_step.setdefault(start, []).append(above / below)
    return tuple(
        Point(step, sum(v) / len(v), min(v), max(v)) for step, v in sorted(per_step.items())
    )

"""What a study is made of, and what studies of language models share: columns, rows, figures.

A study is a question, variants to train, evaluations, metrics as columns, claims and figures:

    acc = Metric("accuracy")
    STUDY = Study(
        "my-study",
        question="Do normalised keys let a model read twice its training length?",
        variants=["Baseline", "KNA"],
        evals=[Eval(lengths=(1, 2))],
        columns={"L": acc.at(1), "2 L": acc.at(2)},
        claims=[Claim("KNA is better", acc.at(2, variant="KNA") - acc.at(2, variant="Baseline"))],
    )

The words of the columns: *train length* is the accuracy at L, always of the unmodified model;
*non-repeated* natural text of the longest length; *repeated* a segment tiled to that length, *seen*
only the tokens whose answer stands earlier; *last segment* the same last L tokens after a context
of some length, *change* what the longest context adds to the shortest; *cost at L* what a method
changes at the training length when it is switched on there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import polars as pl

from normattn.lab.report.claim import Claim
from normattn.lab.report.figure import (
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
from normattn.lab.report.page import Page
from normattn.lab.report.points import bin_points, points, step_points
from normattn.lab.report.table import Cell, Column, Row, Table
from normattn.lab.report.view import View
from normattn.lab.stats import LONGEST, SHORTEST, Metric
from normattn.lab.stats.arrays import Where
from normattn.lab.sweep import study as sweep
from normattn.lab.sweep.collect import measured_below
from normattn.lab.sweep.language import (
    CausalCell,
    ReadCell,
    TextConfig,
    canonical,
    checked_methods,
    opened,
    text_sweep,
    usable,
)
from normattn.lab.sweep.measuring import evaluation_sets
from normattn.lab.sweep.reading import AS_IS
from normattn.lab.sweep.settings import PROTOCOLS, Preset, Protocol, merged
from normattn.lab.sweep.study import Request, Sweep, cells_of, seeds_of
from normattn.lab.training import TrainingConfig

__all__ = ["Claim", "Eval", "Method", "Metric", "Preset", "Run", "Study", "Variant"]

Method = str
"""A change after training by its name, as "ReRoPE(window=64)"; "as is" is the unmodified model."""
Run = CausalCell
"""One training of a variant with one seed, and what is measured of it."""


@dataclass(frozen=True)
class Variant:
    """What is trained: a score, under a name of its own where further settings differ.

    `settings` are laid over the preset's training settings, by dotted name.
    """

    name: str
    score: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Eval:
    """How trained models are read: the protocols, and the lengths in units of L."""

    lengths: tuple[int, ...] = (1, 2, 4, 8)
    protocols: tuple[Protocol, ...] = PROTOCOLS


class VariantRun(ReadCell):
    """A run of a `Variant` that has a score or settings of its own."""

    kind: Literal["variant"] = "variant"  # type: ignore[assignment]
    score: str

    @property
    def training_config(self) -> TrainingConfig:
        """The settings of this training run."""
        varied = {"seed": self.seed, "model.score": self.score}
        return TrainingConfig.parse(merged(self.training, varied), f"the settings of {self.name}")


class Study(sweep.Study):
    """One experiment: what it asks, trains and measures, and the report that it becomes.

    `variants`, `methods` and `evals` say what is trained and how it is read; `--variants` and
    `--methods` choose others. A study that needs more gives `resolve`, which makes the runs of a
    request. `columns` are metrics by their titles; a study with several tables gives `tables`.
    `claims` and `figures` are lists, or functions of what was measured; without figures the
    columns are drawn with their intervals.
    """

    def __init__(
        self,
        name: str,
        question: str,
        *,
        title: str = "",
        help: str = "",
        sources: Sequence[str] = (),
        variants: Sequence[str | Variant] = (),
        methods: Sequence[Method] = (AS_IS,),
        evals: Sequence[Eval] = (),
        columns: Mapping[str, Metric] | None = None,
        tables: Sequence[Table] = (),
        claims: Sequence[Claim] | Callable[[View], Sequence[Claim]] = (),
        figures: Sequence[Figure] | Callable[[View], Sequence[Figure]] | None = None,
        summary: Callable[[View], Sequence[str]] = lambda view: (),
        notes: Callable[[View], Sequence[str]] = lambda view: (),
        resolve: Callable[[Request], Sweep] | None = None,
        variants_help: str = "",
        methods_help: str = "",
        runs: Sequence[type[sweep.Cell]] = (ReadCell, VariantRun),
        collect: Callable[[Any], pl.DataFrame] = measured_below,
        **options: Any,
    ) -> None:
        shown = tuple(Column(_key(name), name, metric) for name, metric in (columns or {}).items())
        order = tuple(v if isinstance(v, str) else v.name for v in variants)
        main = Table("table", "", lambda view: _rows_in_order(view, order), shown)
        super().__init__(
            name=name,
            help=help or question,
            resolve=resolve or (lambda request: _resolve(request, name, variants, methods, evals)),
            cells=tuple(runs),
            page=Page(
                title=title or name,
                question=question,
                sources=tuple(sources),
                tables=tuple(tables) or (main,),
                claims=_as_function(claims),
                figures=_as_function(figures)
                if figures is not None
                else lambda view: [
                    intervals(view, "columns", title or name, main.rows(view), shown)
                ],
                notes=notes,
                summary=summary,
            ),
            variants=variants_help or ("Scores, by commas." if variants else ""),
            methods=methods_help or ("Ways of reading, by commas." if variants else ""),
            collect=collect,
            **options,
        )


def _as_function(given: Any) -> Callable[[View], Any]:
    return given if callable(given) else lambda view: given


def _key(title: str) -> str:
    return re.sub(r"\W+", "_", title).strip("_").lower() or "column"


def _rows_in_order(view: View, order: Sequence[str]) -> list[Row]:
    """A row for every variant and method that was read, variants as the study names them."""
    pairs = pairs_of(view.frame.filter(pl.col("protocol") != "training"), order)
    return [row_of(*pair) for pair in pairs]


def _resolve(
    request: Request,
    name: str,
    variants: Sequence[str | Variant],
    methods: Sequence[Method],
    evals: Sequence[Eval],
) -> Sweep:
    """A run of each variant and seed, read with each method that its score can take."""
    preset = opened(request, name, Preset)
    read = evals[0] if evals else None
    own = {"multiples": read.lengths, "protocols": read.protocols} if read else None
    config = TextConfig.of_text(preset, own)
    named = [v if isinstance(v, Variant) else Variant(v) for v in request.variants or variants]
    scores = {v.name: canonical((v.score or v.name,), config)[0] for v in named}
    ways = checked_methods(request.methods or tuple(methods), config)
    applicable, skipped = usable(dict.fromkeys(scores.values(), ways), config)
    cells = [
        cell
        for variant in named
        for cell in _runs(variant, scores[variant.name], applicable, config, request, preset)
    ]
    return text_sweep(request, name, config, cells, evaluation_sets, skipped)


def _runs(
    variant: Variant,
    score: str,
    methods: Mapping[str, tuple[str, ...]],
    config: TextConfig,
    request: Request,
    preset: Preset,
) -> Sequence[ReadCell]:
    """The runs of a variant, one for each seed."""
    own: dict[str, Any] = {"methods": methods[score]}
    if not variant.score and not variant.settings:
        return cells_of(ReadCell, config, seeds_of(request, preset), {score: own})
    own |= {"score": score, "training": merged(config.training, variant.settings)}
    return cells_of(VariantRun, config, seeds_of(request, preset), {variant.name: own})


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

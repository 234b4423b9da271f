"""How far does each method let a trained model read, up to 64 times its training length?

Models are trained as in `keynorm` and then read by position and asked for facts (`TASKS`) under
every post-hoc method that their score can take. The same page is what `normattn report` makes of
runs that were evaluated by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import polars as pl

from normattn.lab.report.figure import Curves, Figure, Grid, Line, Mark, Panel
from normattn.lab.report.points import bin_points, octaves
from normattn.lab.report.table import Column, Row, Table
from normattn.lab.report.view import View
from normattn.lab.stats import Metric
from normattn.lab.stats.metrics import accuracy
from normattn.lab.studies.base import (
    ACCURACY,
    LEGEND,
    LOSS,
    METHOD_ORDER,
    Study,
    history_figure,
    length_figure,
    pairs_of,
    position_figures,
    ranked,
    reading_columns,
    reading_rows,
    row_of,
    table_figure,
)
from normattn.lab.sweep.language import (
    ReadCell,
    TextConfig,
    canonical,
    checked_methods,
    opened,
    read_sweep,
    usable,
)
from normattn.lab.sweep.methods import ALL, candidates
from normattn.lab.sweep.reading import AS_IS
from normattn.lab.sweep.settings import EvaluationSettings, Preset, validated
from normattn.lab.sweep.study import Request, Sweep
from normattn.settings import Settings

KIND = "reading"
VARIANTS = ("Baseline", "KNA", "CosA-logn")
POSITION, RETRIEVAL = "by_position", "retrieval"
OWN_TABLES = (POSITION, RETRIEVAL)
"""Protocols whose rows stand in tables of their own."""
TASK = "factor.task"
TASKS = {
    "passkey": "passkey",
    "multi_key": "multi-key",
    "variable_tracking": "variable tracking",
    "key_value": "key-value",
    "copy": "copy",
}
EXACT = accuracy("answers right", "exact")

INSTEAD = {"multiples": "reading.multiples", "protocols": "the protocols of its question"}


class ReadingSettings(Settings):
    """`reproduce reading`: the lengths in units of L; each must have room for the facts asked."""

    multiples: tuple[int, ...] = (1, 4, 16, 64)


class ReadingPreset(Preset):
    """A preset with the lengths that are read."""

    reading: ReadingSettings = ReadingSettings()


def resolve(request: Request) -> Sweep:
    """Every choice made and checked, as `keynorm.resolve` does."""
    preset = opened(request, KIND, ReadingPreset, INSTEAD)
    read = {"multiples": preset.reading.multiples, "protocols": (POSITION, RETRIEVAL)}
    settings = validated(
        EvaluationSettings, {**preset.evaluation.model_dump(), **read}, "reading.multiples"
    )
    config = TextConfig.of_text(preset, dict(settings))
    asked = None if request.methods in (None, (ALL,)) else request.methods
    methods = (AS_IS, *candidates()) if asked is None else checked_methods(asked, config)
    variants = canonical(request.variants or VARIANTS, config)
    ways, skipped = usable(dict.fromkeys(variants, methods), config)
    return read_sweep(request, KIND, preset, config, ways, skipped)


def rows_of(protocol: str) -> Callable[[View], list[Row]]:
    """Rows that were read by one protocol."""
    return lambda view: [row_of(*pair) for pair in pairs_of(view.frame.filter(protocol=protocol))]


def _standard_rows(view: View) -> list[Row]:
    read = view.frame.filter(~pl.col("protocol").is_in([*OWN_TABLES, "training"]))
    return reading_rows(View(read, view.bootstrap)) if read.height else []


def octave_columns(metric: Metric) -> Callable[[View], Sequence[Column]]:
    """The metric at positions up to L, 2 L, 4 L, …"""
    at = metric.at(protocol=POSITION)
    return lambda view: [
        Column(f"{metric.name}_{number}", title, at.between(span))
        for number, (_, title, span) in enumerate(octaves(view, ACCURACY, {"protocol": POSITION}))
    ]


def _retrieval_columns(view: View) -> list[Column]:
    if TASK not in view.frame.columns:
        return []
    return [
        Column(
            f"{task}_{key}_{length}",
            f"{title}, {words}, {length:,}",
            metric.at({TASK: task}, protocol=RETRIEVAL, length=length),
        )
        for task, title in TASKS.items()
        for length in sorted(view.values("length", {"protocol": RETRIEVAL, TASK: task}))
        for key, metric, words in (("exact", EXACT, "answers"), ("token", ACCURACY, "tokens"))
    ]


def figures(view: View) -> list[Figure]:
    """Accuracy and loss by position, retrieval by depth, and what the standard protocols give."""
    drawn: list[Figure] = []
    standard = view.frame.filter(~pl.col("protocol").is_in(OWN_TABLES))
    if standard.filter(pl.col("protocol") != "training").height:
        plain = View(standard, view.bootstrap)
        drawn += [*position_figures(plain), length_figure(plain), table_figure(plain)]
    if standard.filter(pl.col("protocol") == "training").height:
        drawn.append(history_figure(view))
    drawn += [_by_position(view, row) for row in view.values("row", {"protocol": POSITION})]
    return [*drawn, *_by_depth(view)]


def _by_position(view: View, row: str) -> Figure:
    where = {"row": row, "protocol": POSITION}
    mark = Mark(float(view.one("train_length", where) or 1), "L")
    panels = []
    for metric, unit in ((ACCURACY, "accuracy (%)"), (LOSS, "loss (nats)")):
        lines = []
        for method in ranked(view.values("method", where), METHOD_ORDER):
            at = {**where, "method": method}
            plotted = bin_points(view, metric, at, lambda bin_: bin_[3])
            if plotted:
                lines.append(Line(method or "as is", plotted, method or "as is"))
        panel = Panel(metric.title, tuple(lines), "position", unit, log_x=True, marks=(mark,))
        panels.append(panel)
    name = f"reading_by_position_{row}".replace("(", "_").replace(")", "").replace("=", "")
    return Curves(name, f"{row}: by position", tuple(panels), shared_y=False)


def _by_depth(view: View) -> Iterator[Figure]:
    """Tokens of the answers that are right, by depth of the fact, at the longest length."""
    length = view.longest(RETRIEVAL)
    if length is None:
        return
    for task in view.values(TASK, {"protocol": RETRIEVAL}):
        where = {"protocol": RETRIEVAL, TASK: task, "length": length}
        read = {row.label: view.sums("accuracy", {**row.where, **where}) for row in rows(view)}
        known = {name: sums for name, sums in read.items() if sums is not None}
        if not known:
            continue
        depths = [f"{depth:.2f}" for _, _, depth, _ in next(iter(known.values())).bins]
        values = tuple(
            tuple((100 * sums.numerator.sum((0, 1)) / sums.denominator.sum((0, 1))).tolist())
            for sums in known.values()
        )
        yield Grid(
            f"retrieval_{task}",
            f"{TASKS[task]} at {length:,} tokens: answer tokens right, %",
            tuple(known),
            tuple(depths),
            values,
            tuple(tuple(f"{value:.0f}" for value in line) for line in values),
            x_title="depth of the fact (0: beginning)",
            scale_title="%",
        )


rows = rows_of(RETRIEVAL)

STUDY = Study(
    KIND,
    "How far does each score, and each post-hoc method, let a model read past the length "
    "it was trained at?",
    title="Reading past the training length",
    help="Train Baseline, KNA and CosA-logn and read them to 64 times the training length by every "
    "post-hoc method, by position and by retrieval.",
    sources=("kexue.fm/archives/9708", "kexue.fm/archives/9859"),
    resolve=resolve,
    runs=(ReadCell,),
    tables=(
        Table(
            "table",
            "",
            _standard_rows,
            reading_columns,
            notes=LEGEND,
            intro="Token accuracy in % (losses in nats) on held-out text.",
        ),
        Table(
            "accuracy_by_position",
            "Accuracy by position, %",
            rows_of(POSITION),
            octave_columns(ACCURACY),
            intro="Natural held-out text, every token scored, in octaves of the training length.",
        ),
        Table(
            "loss_by_position", "Loss by position, nats", rows_of(POSITION), octave_columns(LOSS)
        ),
        Table(
            "retrieval",
            "Facts stated in a long text and asked for at its end, %",
            rows,
            _retrieval_columns,
            notes=(
                "answers: right as a whole, as greedy decoding would give them; tokens: of "
                "the answers.",
            ),
        ),
    ),
    figures=figures,
    variants_help="Trained scores, by commas. [default: Baseline, KNA, CosA-logn]",
    methods_help="Ways of reading, or `all`. [default: all]",
    examples=(
        ("--preset smoke --variants KNA --methods 'as is,ReRoPE'", "the whole path, small"),
        ("--plan", "what the study itself costs here"),
    ),
)
PAGE = STUDY.page

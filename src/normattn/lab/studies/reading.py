"""How far does each method let a trained model read, up to 64 times its training length?

Models are trained as in `keynorm` and then read by position and asked for facts (`TASKS`) under
every post-hoc method that their score can take. The same page is what `normattn report` makes of
runs that were evaluated by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from normattn.lab.report.figure import Curves, Figure, Grid, Line, Mark, Panel
from normattn.lab.report.page import Page
from normattn.lab.report.points import bin_points, octaves
from normattn.lab.report.table import Column, Row, Table
from normattn.lab.report.view import View
from normattn.lab.stats.metrics import Statistic, accuracy
from normattn.lab.studies._reading import (
    ACCURACY,
    LEGEND,
    LOSS,
    METHOD_ORDER,
    history_figure,
    length_figure,
    longest,
    pairs_of,
    position_figures,
    ranked,
    reading_columns,
    reading_rows,
    row_of,
    table_figure,
)
from normattn.lab.sweep.collect import measured_below
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
from normattn.lab.sweep.study import Request, Study, Sweep
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


def _rows_of(protocol: str) -> Any:
    """Rows that were read by one protocol."""

    def rows(view: View) -> list[Row]:
        return [row_of(*pair) for pair in pairs_of(view.frame.filter(protocol=protocol))]

    return rows


def _standard_rows(view: View) -> list[Row]:
    read = view.frame.filter(~pl.col("protocol").is_in([*OWN_TABLES, "training"]))
    return reading_rows(View(read, view.bootstrap)) if read.height else []


def _octave_columns(statistic: Statistic) -> Any:
    def columns(view: View) -> Sequence[Column]:
        at = ((1.0, {"protocol": POSITION}),)
        return [
            Column(f"{statistic.name}_{n}", title, statistic, at, bins=places)
            for n, (_, title, places) in enumerate(octaves(view, ACCURACY, at[0][1]))
        ]

    return columns


_ASKED = (("exact", EXACT, "answers"), ("token", ACCURACY, "tokens"))


def _retrieval_columns(view: View) -> Sequence[Column]:
    columns: list[Column] = []
    if TASK not in view.frame.columns:
        return columns
    for task, title in TASKS.items():
        for length in sorted(view.values("length", {"protocol": RETRIEVAL, TASK: task})):
            at = ((1.0, {"protocol": RETRIEVAL, TASK: task, "length": length}),)
            for key, statistic, words in _ASKED:
                name = f"{task}_{key}_{length}"
                columns.append(Column(name, f"{title}, {words}, {length:,}", statistic, at))
    return columns


def figures(view: View) -> list[Figure]:
    """Accuracy and loss by position, retrieval by depth, and what the standard protocols give."""
    all_figures: list[Figure] = []
    standard = view.frame.filter(~pl.col("protocol").is_in(OWN_TABLES))
    if standard.filter(pl.col("protocol") != "training").height:
        plain = View(standard, view.bootstrap)
        all_figures += [*position_figures(plain), length_figure(plain), table_figure(plain)]
    if standard.filter(pl.col("protocol") == "training").height:
        all_figures.append(history_figure(view))
    for row in view.values("row", {"protocol": POSITION}):
        all_figures.append(_by_position(view, row))
    return [*all_figures, *_by_depth(view)]


def _by_position(view: View, row: str) -> Figure:
    where = {"row": row, "protocol": POSITION}
    length = float(view.one("train_length", where) or 1)
    panels = []
    for statistic, unit in ((ACCURACY, "accuracy (%)"), (LOSS, "loss (nats)")):
        lines = []
        for method in ranked(view.values("method", where), METHOD_ORDER):
            at = {**where, "method": method}
            plotted = bin_points(view, statistic, at, lambda bin_: bin_[3])
            if plotted:
                lines.append(Line(method or "as is", plotted, method or "as is"))
        panels.append(
            Panel(
                statistic.title,
                tuple(lines),
                "position",
                unit,
                log_x=True,
                marks=(Mark(length, "L"),),
            )
        )
    name = f"reading_by_position_{row}".replace("(", "_").replace(")", "").replace("=", "")
    return Curves(name, f"{row}: by position", tuple(panels), shared_y=False)


def _by_depth(view: View) -> list[Figure]:
    """Tokens of the answers that are right, by depth of the fact, at the longest length."""
    length = longest(view, RETRIEVAL)
    if length is None:
        return []
    grids: list[Figure] = []
    for task in view.values(TASK, {"protocol": RETRIEVAL}):
        where = {"protocol": RETRIEVAL, TASK: task, "length": length}
        rows = _rows_of(RETRIEVAL)(view)
        values: list[tuple[float, ...]] = []
        depths: list[str] = []
        for row in rows:
            sums = view.sums(ACCURACY.name, {**row.where, **where})
            if sums is None:
                values.append(())
                continue
            depths = [f"{bin_:.2f}" for _, _, bin_, _ in sums.bins]
            shares = 100 * sums.numerator.sum((0, 1)) / sums.denominator.sum((0, 1))
            values.append(tuple(float(v) for v in shares))
        kept = [(row, line) for row, line in zip(rows, values, strict=True) if line]
        grids.append(
            Grid(
                f"retrieval_{task}",
                f"{TASKS[task]} at {length:,} tokens: answer tokens right, %",
                tuple(row.label for row, _ in kept),
                tuple(depths),
                tuple(line for _, line in kept),
                tuple(tuple(f"{v:.0f}" for v in line) for _, line in kept),
                x_title="depth of the fact (0: beginning)",
                scale_title="%",
            )
        )
    return grids


PAGE = Page(
    title="Reading past the training length",
    question="How far does each score, and each post-hoc method, let a model read past the length "
    "it was trained at?",
    sources=("kexue.fm/archives/9708", "kexue.fm/archives/9859"),
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
            _rows_of(POSITION),
            _octave_columns(ACCURACY),
            intro="Natural held-out text, every token scored, in octaves of the training length.",
        ),
        Table(
            "loss_by_position", "Loss by position, nats", _rows_of(POSITION), _octave_columns(LOSS)
        ),
        Table(
            "retrieval",
            "Facts stated in a long text and asked for at its end, %",
            _rows_of(RETRIEVAL),
            _retrieval_columns,
            notes=(
                "answers: right as a whole, as greedy decoding would give them; tokens: of "
                "the answers.",
            ),
        ),
    ),
    figures=figures,
)

STUDY = Study(
    name=KIND,
    help="Train Baseline, KNA and CosA-logn and read them to 64 times the training length by every "
    "post-hoc method, by position and by retrieval.",
    resolve=resolve,
    cells=(ReadCell,),
    page=PAGE,
    variants="Trained scores, by commas. [default: Baseline, KNA, CosA-logn]",
    methods="Ways of reading, or `all`. [default: all]",
    examples=(
        ("--preset smoke --variants KNA --methods 'as is,ReRoPE'", "the whole path, small"),
        ("--plan", "what the study itself costs here"),
    ),
    collect=measured_below,
)

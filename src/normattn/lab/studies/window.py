"""How wide should ReRoPE's window be, and what does log-n scaling add to it? (kexue 9708)

A Baseline and a Baseline-logn model are trained, and read past L with ReRoPE at several windows;
the first one with logn+ (switched on after training) too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import polars as pl
from pydantic import Field, field_validator

from normattn.errors import InputError
from normattn.lab.report.claim import Claim
from normattn.lab.report.figure import Curves, Figure, Line, Panel, Point
from normattn.lab.report.points import points
from normattn.lab.report.table import NOTHING, Cell, Column, Row, Table, text_column
from normattn.lab.report.view import View
from normattn.lab.studies.base import ACCURACY, LEGEND, Study, past, reading_columns
from normattn.lab.sweep.collect import measured_below
from normattn.lab.sweep.language import (
    ReadCell,
    TextConfig,
    canonical,
    checked_methods,
    opened,
    read_sweep,
)
from normattn.lab.sweep.reading import AS_IS
from normattn.lab.sweep.settings import Preset
from normattn.lab.sweep.study import Request, Sweep, refuse_choices
from normattn.score import ScoreSpec
from normattn.settings import Settings

KIND = "window"
VARIANTS = ("Baseline", "Baseline-logn")
FORM, WINDOW = "factor.logn", "factor.window"
FORMS = PLAIN, POST_HOC, TRAINED = "no log-n", "logn+", "logn"
DRAWN = ("non_repeated", "repeated", "last_segment")


class WindowSettings(Settings):
    """`reproduce window`: the windows of ReRoPE, as shares of the training length."""

    shares: tuple[Annotated[float, Field(gt=0)], ...] = (0.125, 0.25, 0.5, 0.75, 1.0)

    @field_validator("shares")
    @classmethod
    def _rising(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not value or list(value) != sorted(set(value)):
            raise ValueError(f"shares must rise, got {list(value)}")
        return value


class WindowPreset(Preset):
    """A preset with the windows."""

    window: WindowSettings = WindowSettings()


class WindowConfig(TextConfig):
    """What the study's runs share: also the windows."""

    window: WindowSettings


def resolve(request: Request) -> Sweep:
    """The study that a request asks for; raises `InputError` as `keynorm.resolve` does.

    Only the longest of the tested lengths is read.
    """
    preset = opened(request, KIND, WindowPreset)
    refuse_choices(request, KIND, variants=False)
    config = WindowConfig.of_text(preset, {"multiples": preset.evaluation.multiples[-1:]})
    methods = {variant: _methods(variant, config) for variant in canonical(VARIANTS, config)}
    return read_sweep(request, KIND, preset, config, methods)


def _methods(variant: str, config: WindowConfig) -> tuple[str, ...]:
    """Unmodified, then every window; for the model without log-n also with logn+."""
    sizes = [max(1, round(share * config.train_length)) for share in config.window.shares]
    if len(set(sizes)) < len(sizes):
        raise InputError(
            f"window.shares give the same window twice at a training length of "
            f"{config.train_length}: {sizes}"
        )
    methods = [AS_IS, *(f"ReRoPE(window={size})" for size in sizes)]
    if ScoreSpec.parse(variant).logn is None:
        methods += ["logn+", *(f"ReRoPE(window={size})-logn+" for size in sizes)]
    return checked_methods(methods, config)


def collect(out: Path) -> pl.DataFrame:
    """What was measured, with the form of log-n and the window of each score as factors."""
    measured = measured_below(out)
    if not measured.height:
        return measured
    read = measured.filter(pl.col("protocol") != "training")
    specs = [(text, ScoreSpec.parse(text)) for text in read["score"].unique(maintain_order=True)]
    factors = pl.DataFrame(
        {
            "score": [text for text, _ in specs],
            FORM: [_form(spec) for _, spec in specs],
            WINDOW: [spec.remapping.window if spec.remapping else None for _, spec in specs],
        },
        schema={"score": pl.String, FORM: pl.String, WINDOW: pl.Int64},
    )
    return measured.join(factors, on="score", how="left", maintain_order="left")


def _form(spec: ScoreSpec) -> str:
    if spec.logn is None:
        return PLAIN
    return TRAINED if spec.logn.when == "trained-in" else POST_HOC


def rows(view: View) -> list[Row]:
    """Forms of log-n, windows ascending, the model without ReRoPE first."""
    read = view.frame.filter(pl.col("protocol") != "training")
    settings = read.select(FORM, WINDOW).unique().rows() if read.height else []
    settings.sort(key=lambda setting: (FORMS.index(setting[0]), setting[1] or 0))
    return [Row(form, {FORM: form, WINDOW: window}) for form, window in settings]


def columns(view: View) -> Sequence[Column]:
    """The window, then what a method reads past L."""
    kept = ("repeated", "repeated_seen", "non_repeated", "last_", "cost")
    read = [column for column in reading_columns(view) if column.key.startswith(kept)]
    return [
        *_window_columns(view),
        *(replace(c, plain=_cost) if c.key == "cost" else c for c in read),
    ]


def _window_columns(view: View) -> list[Column]:
    length = int(max(view.values("train_length")))

    def share(view: View, row: Row) -> Fraction | None:
        return row.where[WINDOW] and Fraction(row.where[WINDOW], length)

    return [
        text_column("share", "w / L", share),
        text_column("window", "w", lambda view, row: row.where[WINDOW]),
    ]


def _cost(view: View, row: Row) -> Cell:
    """What the method changes at L, against the same trained model without it."""
    base = {FORM: TRAINED if row.where[FORM] == TRAINED else PLAIN, WINDOW: None}
    if row.where == base:
        return NOTHING
    at_l = ACCURACY.at(protocol="train_length")
    return Column("cost", "cost at L", at_l - at_l.at(base)).cell(view, row)


def gains(view: View) -> list[Column]:
    """What a form of log-n adds to none at the same window."""
    metrics = {name: past(ACCURACY, view, name) for name in DRAWN if view.longest(name)}
    return [
        *_window_columns(view),
        *(
            Column(name, _title(view, name), metric - metric.at({FORM: PLAIN}))
            for name, metric in metrics.items()
        ),
    ]


def _title(view: View, protocol: str) -> str:
    return f"{protocol.replace('_', ' ')} ({view.longest(protocol):,})"


def claims(view: View) -> list[Claim]:
    """logn+ helps ReRoPE at every window: the mean over windows would hide which."""
    natural = past(ACCURACY, view, "non_repeated")
    gain = natural.at({FORM: POST_HOC}) - natural.at({FORM: PLAIN})
    windows = [row.where[WINDOW] for row in rows(view) if row.where[FORM] == PLAIN]
    return [
        Claim(
            f"logn+ improves ReRoPE with w = {window}",
            gain.at({WINDOW: window}),
            *("kexue 9708", "logn+ − no log-n, non-repeated accuracy"),
        )
        for window in windows
        if window is not None
    ]


def figures(view: View) -> list[Figure]:
    """Accuracy against w / L, one line per form of log-n; dotted: without ReRoPE."""
    panels = [
        Panel(_title(view, name), tuple(_lines(view, name)), "w / L", "accuracy (%)")
        for name in DRAWN
        if view.longest(name)
    ]
    title = "Accuracy past the training length against ReRoPE's window"
    return [Curves("accuracy_by_window", title, tuple(panels), shared_y=False)]


def _lines(view: View, protocol: str) -> list[Line]:
    length, lines = max(view.values("train_length")), []
    for form in FORMS:
        at = {"protocol": protocol, "length": view.longest(protocol), FORM: form}
        level = view.estimate(ACCURACY, {**at, WINDOW: None})
        windows = [row.where[WINDOW] for row in rows(view) if row.where[FORM] == form]
        places = ((w / length, {**at, WINDOW: w}) for w in windows if w is not None)
        shares = points(view, ACCURACY, places)
        if shares:
            lines.append(Line(form, shares, form))
        if level is not None and shares:
            flat = tuple(Point.of(x, level) for x in (shares[0].x, shares[-1].x))
            lines.append(Line(f"{form}, no ReRoPE", flat, form, dashed=True))
    return lines


STUDY = Study(
    KIND,
    "How wide should ReRoPE's window w be, and what does log-n scaling add, trained in or "
    "switched on afterwards (logn+)?",
    title="ReRoPE's window",
    help="Read with ReRoPE at windows of ⅛ to 1 training lengths, without log-n, with it and "
    "logn+.\n\nTrains Baseline and Baseline-logn, reads to 8 times the training length, and "
    "writes one table and one figure: accuracy against the window, a line for each form of log-n.",
    sources=("kexue.fm/archives/9708",),
    resolve=resolve,
    runs=(ReadCell,),
    tables=(
        Table(
            "table",
            "",
            rows,
            columns,
            head="log-n",
            notes=LEGEND,
            intro="Token accuracy in %. Rows without a window are the models without ReRoPE.",
        ),
        Table(
            "gains",
            "What log-n adds at the same window, in points",
            lambda view: [row for row in rows(view) if row.where[FORM] != PLAIN],
            gains,
            head="log-n",
        ),
    ),
    claims=claims,
    figures=figures,
    collect=collect,
    examples=(
        ("--preset smoke", "the whole path, small"),
        ("", "the study itself"),
        ("--seeds 3", "with intervals over three trained models"),
        ('--set "window.shares=[0.25,0.5,1,2]"', "other windows"),
    ),
)

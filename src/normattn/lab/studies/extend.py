"""Which inference-time methods let existing models handle longer text, and at what cost?

*extend*: `normattn extend MODEL` evaluates every method on the same windows of the user's text. A
shorter length is the end of a window, so the same final tokens are scored after every context.

*gallery*: `normattn report` of several such folders compares models and texts. Lengths are
multiples of each model's training length L.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from normattn.errors import InputError
from normattn.lab.report.figures import Figure
from normattn.lab.report.tables import (
    EMPTY_CELL,
    Cell,
    Column,
    Row,
    Table,
    estimate_column,
    format_estimate,
    text_column,
)
from normattn.lab.report.view import View
from normattn.lab.runs import RunDirectory
from normattn.lab.stats import Estimate, MeasurementStore, Metric, measurements, select
from normattn.lab.stats.arrays import Array, Where
from normattn.lab.stats.metrics import ratio
from normattn.lab.studies.advice import (
    LAST,
    LOSS,
    TRAIN,
    advise,
    cost_at_train_length,
    format_length,
    home_length,
    lengths_of,
    methods_of,
    name_of,
    resolved,
    train_length,
)
from normattn.lab.studies.base import Study
from normattn.lab.studies.lm_report import interval_figure, methods_by_position

KIND, MEASUREMENTS = "extend", "measurements"
KEY, PREFILL = "retrieval", "prefill"
SECONDS, PEAK = "prefill_seconds", "peak_bytes"
ACCURACY, EXACT = Metric("accuracy"), Metric("exact", "pass keys found", ratio(100.0), "%", 1)
LINEAR = 0.1
"""Nats up to which the axis of changes is linear; beyond, it is logarithmic."""
SOURCES = ("kexue.fm/archives/9708", "arXiv:2309.00071", "arXiv:2401.01325")

Columns = Callable[[View], Sequence[Column]]


def complete(measured: pl.DataFrame, windows: int) -> pl.DataFrame:
    """The rows of the methods and lengths that were evaluated in all `windows`."""
    scored = measured.filter(pl.col("protocol") == LAST)
    counts = scored.group_by("method", "length").agg(pl.col("unit").n_unique().alias("windows"))
    evaluated = counts.filter(pl.col("windows") == windows)
    return measured.join(evaluated.select("method", "length"), on=["method", "length"], how="semi")


def collect(out: Path) -> pl.DataFrame:
    """The complete measurements of the run directory `out`."""
    windows = int(RunDirectory.existing(out).config["windows"])
    return complete(MeasurementStore(out / MEASUREMENTS).frame(), windows)


def _rows(view: View) -> list[Row]:
    return [Row(name_of(method), {"method": method}) for method in methods_of(view)]


def _with_parameters(view: View, row: Row) -> str | None:
    return resolved(view, row.where) if row.where["method"] else None


PARAMETERS = text_column("parameters", "with all parameters", _with_parameters)


def _cost_column(key: str, title: str) -> Column:
    return estimate_column(
        *(key, title, lambda view, row: cost_at_train_length(view, row.where)),
        lambda cost: format_estimate(cost, 2, signed=True),
    )


def _by_length(metric: Metric) -> Columns:
    """Columns of the metric on the same final tokens, one for every length."""
    return lambda view: [
        *(
            Column(f"{metric.name}_{n}", format_length(n), metric.at(protocol=LAST, length=n))
            for n in lengths_of(view)
        ),
        *((PARAMETERS,) if metric is LOSS else ()),
    ]


def _changes(view: View) -> list[Column]:
    """The loss minus that of the unmodified model at its training length, for every length."""
    last = LOSS.at(protocol=LAST)
    unmodified = last.at(length=home_length(view), method="")
    return [
        Column(f"change_{n}", f"after {format_length(n)}", last.at(length=n) - unmodified)
        for n in lengths_of(view)
    ]


def _prefill(view: View) -> list[Column]:
    columns = []
    for n in lengths_of(view):
        where, length = {"protocol": PREFILL, "length": n}, format_length(n)
        columns += [
            _window_column(f"seconds_{n}", f"{length}: s", SECONDS, where, np.median),
            _window_column(f"bytes_{n}", f"{length}: MiB", PEAK, where, np.max),
            Column(f"keys_{n}", f"{length}: pass keys", plain=_keys(n)),
        ]
    return columns


def _window_column(
    key: str, title: str, statistic: str, where: Where, reduce: Callable[[Array], Any]
) -> Column:
    """A column of one number over all windows: seconds, or bytes shown in MiB."""

    def estimated(view: View, row: Row) -> Estimate | None:
        sums = view.sums(statistic, {**row.where, **where})
        if sums is None:
            return None
        return Estimate(float(reduce(sums.numerator)), units=len(sums.units))

    def text(estimate: Estimate) -> str:
        value = estimate.value
        return f"{value:.1f}" if statistic == SECONDS else f"{value / 2**20:,.0f}"

    return estimate_column(key, title, estimated, text)


def _keys(length: int) -> Callable[[View, Row], Cell]:
    """The cell with the number of windows in which the pass key was found."""

    def cell(view: View, row: Row) -> Cell:
        where = {**row.where, "protocol": KEY, "length": length}
        estimate, sums = view.estimate(EXACT, where), view.sums(EXACT.name, where)
        if estimate is None or sums is None:
            return EMPTY_CELL
        return Cell(f"{sums.numerator.sum():.0f} of {sums.denominator.sum():.0f}", estimate)

    return cell


def _prefill_notes(view: View) -> list[str]:
    notes = [
        "s: seconds of the decoder over one whole window, without a cache and without the head, "
        "median over windows. MiB: peak memory of the process minus its memory with the model "
        "loaded, maximum over windows."
    ]
    if view.values("unit", {"protocol": KEY}):
        notes.append(
            "Pass keys: each window states one of five digits at another depth and asks for it at "
            "the end. It is found where greedy decoding would give every digit."
        )
    return notes


def _advice(view: View) -> list[str]:
    scored = view.sums(LOSS.name, {"protocol": LAST, "length": lengths_of(view)[-1], "method": ""})
    setup = f"Trained at {train_length(view):,} tokens, not trained further."
    if scored is not None:
        count = scored.denominator[0, 0].sum()
        setup += f" The last {count:,.0f} tokens of every window are scored."
    return [*advise(view).sentences, setup]


def figures(view: View) -> list[Figure]:
    """Loss on the same final tokens by context, and loss and accuracy by position."""
    title = (
        f"Nats above the unmodified model after {format_length(home_length(view))}, on the same "
        f"final tokens; the axis is linear within ±{LINEAR}"
    )
    return [
        interval_figure(view, "last_segment", title, _rows(view), _changes(view), LINEAR),
        methods_by_position(view, "reading_by_position", "Your text, by position", {}),
    ]


def _table(key: str, title: str, columns: Any, notes: Any = ()) -> Table:
    """A table with a row for each method."""
    return Table(key, title, _rows, columns, notes=notes, head="method")


STUDY = Study(
    "extend",
    "Which method lets this model handle longer text, and at what cost?",
    title="A pretrained model past its training length",
    help="How far a model handles longer text, by inference-time method.",
    sources=SOURCES,
    tables=(
        _table(
            "table",
            "Loss on the same final tokens, by context length (nats)",
            *(_by_length(LOSS), _advice),
        ),
        _table(
            "change",
            "Extra loss over the unmodified model at its training length (nats, paired over "
            "windows)",
            _changes,
        ),
        _table("accuracy", "Accuracy on the same final tokens (%)", _by_length(ACCURACY)),
        _table(
            "cost",
            "Cost at the training length",
            (
                Column("loss", "loss, nats", LOSS.at(protocol=TRAIN)),
                _cost_column("change", "increase over unmodified, %"),
            ),
        ),
        _table(
            "prefill",
            "Prefill time, peak memory, and pass keys found",
            *(_prefill, _prefill_notes),
        ),
    ),
    figures=figures,
    summary=lambda view: advise(view).sentences[:2],
    collect=collect,
    made_by="normattn extend MODEL",
)

# Several models and texts

TEXT, MULTIPLE = "factor.text", "factor.multiple"


def combine(folders: Sequence[Path]) -> pl.DataFrame:
    """The measurements of several folders of `extend`, with each row's text and multiple of L.

    Raises `InputError` where a folder is not from `extend`, and where two have the same model on
    texts of the same name.
    """
    sources: dict[tuple[str, str], Path] = {}
    parts = []
    for folder in folders:
        text, measured = _text(folder), measurements.read(folder / measurements.FILE)
        for model in measured["row"].unique(maintain_order=True):
            if (model, text) in sources:
                both = f"{sources[model, text]} and {folder}"
                raise InputError(f"{both} both hold {model} on {text}")
            sources[model, text] = folder
        multiple = (pl.col("length") / pl.col("train_length")).alias(MULTIPLE)
        parts.append(measured.with_columns(pl.lit(text).alias(TEXT), multiple))
    return measurements.concat(parts).with_columns(pl.lit("gallery").alias("study"))


def settings(folders: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The settings of each of these folders, by the names of its model and text."""
    stored = [RunDirectory.existing(folder, KIND).config for folder in folders]
    return {
        f"{Path(config['model']).stem}, {_text(folder)}": {
            name: value for name, value in config.items() if name not in ("model", "text")
        }
        for folder, config in zip(folders, stored, strict=True)
    }


def _text(folder: Path) -> str:
    """The names of the evaluated text files."""
    text = RunDirectory.existing(folder, KIND).config["text"]
    return " + ".join(Path(file).name for file in ([text] if isinstance(text, str) else text))


def _subjects(view: View) -> list[Where]:
    """Every model on every text, sorted, as rows read from a file may not be."""
    return [
        {"row": model, TEXT: text}
        for model in sorted(view.values("row"))
        for text in sorted(view.values(TEXT, {"row": model}))
    ]


def _subview(view: View, subject: Where) -> View:
    return View(select(view.frame, subject))


def _gallery_rows(view: View) -> list[Row]:
    return [
        Row(f"{subject['row']}, {subject[TEXT]}: {name_of(method)}", {**subject, "method": method})
        for subject in _subjects(view)
        for method in methods_of(_subview(view, subject))
    ]


def _losses(view: View) -> list[Column]:
    multiples = sorted(view.values(MULTIPLE, {"protocol": LAST}))
    titles = {m: f"{m:g} ×" for m in multiples}
    longest = multiples[-1]
    home = max((multiple for multiple in multiples if multiple <= 1), default=multiples[0])
    last = LOSS.at(protocol=LAST)
    change = last.at({MULTIPLE: longest}) - last.at({MULTIPLE: home}, method="")
    keys = EXACT.at({MULTIPLE: longest}, protocol=KEY)
    return [
        *(Column(f"loss_{m:g}", f"after {titles[m]}", last.at({MULTIPLE: m})) for m in multiples),
        Column("change", f"{titles[longest]} above unmodified at {titles[home]}", change),
        _cost_column("cost", "cost on short text, %"),
        Column("keys", f"pass keys at {titles[longest]}, %", keys),
        PARAMETERS,
    ]


def _gallery_advice(view: View) -> list[str]:
    sentences = []
    for subject in _subjects(view):
        measured = _subview(view, subject)
        windows = measured.frame.filter(pl.col("protocol") == LAST)["unit"].n_unique()
        sentences.append(
            f"{subject['row']} on {subject[TEXT]} ({windows} windows, L = "
            f"{train_length(measured):,}): {advise(measured).sentences[0]}"
        )
    return sentences


def _gallery_figures(view: View) -> list[Figure]:
    losses = [column for column in _losses(view) if column.metric and column.metric.name == "loss"]
    title = "Loss on the same final tokens (nats), after multiples of the training length"
    return [interval_figure(view, "gallery", title, _gallery_rows(view), losses)]


GALLERY = Study(
    "gallery",
    "Which inference-time methods let existing models handle longer text, and at what cost?",
    title="Pretrained models past their training length",
    help="How far pretrained models handle longer text, on several texts.",
    sources=SOURCES,
    tables=(
        Table(
            "table",
            "Loss on the same final tokens (nats), after multiples of the training length",
            _gallery_rows,
            _losses,
            notes=_gallery_advice,
            head="model, text: method",
        ),
    ),
    figures=_gallery_figures,
    made_by="normattn report FOLDER FOLDER …",
)

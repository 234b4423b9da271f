"""How far do existing models read, by which inference-time method, at what cost?

*extend*: `normattn extend MODEL` has every method read the same windows of the user's text. A
shorter length is a window's end, so that the same last tokens are scored after contexts of every
length. *gallery*: `normattn report` of several such folders puts models and texts side by side;
lengths are compared as multiples of each model's training length L.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from normattn.errors import InputError
from normattn.lab.report.figures import Curves, Figure, Line, Panel
from normattn.lab.report.tables import (
    NOTHING,
    Cell,
    Column,
    Row,
    Table,
    estimate_column,
    shown,
    text_column,
)
from normattn.lab.report.view import View, bin_points
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
    home,
    lengths_of,
    methods_of,
    name_of,
    resolved,
    train_length,
)
from normattn.lab.studies.base import Study
from normattn.lab.studies.lm_report import intervals
from normattn.score.spec import UNMODIFIED

KIND, MEASUREMENTS = "extend", "measurements"
POSITION, KEY, PREFILL = "by_position", "retrieval", "prefill"
SECONDS, PEAK = "prefill_seconds", "peak_bytes"
ACCURACY, EXACT = Metric("accuracy"), Metric("exact", "pass keys found", ratio(100.0), "%", 1)
LINEAR = 0.1
"""Nats: where the axis of changes turns logarithmic, as an unmodified model loses a hundredfold."""
SOURCES = ("kexue.fm/archives/9708", "arXiv:2309.00071", "arXiv:2401.01325")

Columns = Callable[[View], Sequence[Column]]


def complete(measured: pl.DataFrame, windows: int) -> pl.DataFrame:
    """The rows of every method and length whose text was read in all its windows."""
    text = measured.filter(pl.col("protocol") == LAST)
    counts = text.group_by("method", "length").agg(pl.col("unit").n_unique().alias("read"))
    whole = counts.filter(pl.col("read") == windows)
    return measured.join(whole.select("method", "length"), on=["method", "length"], how="semi")


def collect(out: Path) -> pl.DataFrame:
    """What was read in every window, of the run directory `out`."""
    windows = int(RunDirectory.existing(out).config["windows"])
    return complete(MeasurementStore(out / MEASUREMENTS).frame(), windows)


def _rows(view: View) -> list[Row]:
    return [Row(name_of(method), {"method": method}) for method in methods_of(view)]


def _with_parameters(view: View, row: Row) -> str | None:
    return resolved(view, row.where) if row.where["method"] else None


PARAMETERS = text_column("parameters", "with its parameters", _with_parameters)


def _cost_column(key: str, title: str) -> Column:
    """By how many percent the loss at the training length rises under a method."""
    return estimate_column(
        *(key, title, lambda view, row: cost_at_train_length(view, row.where)),
        lambda cost: shown(cost, 2, signed=True),
    )


def _by_length(metric: Metric) -> Columns:
    """A column for every length, of the last tokens."""
    return lambda view: [
        *(
            Column(f"{metric.name}_{n}", format_length(n), metric.at(protocol=LAST, length=n))
            for n in lengths_of(view)
        ),
        *((PARAMETERS,) if metric is LOSS else ()),
    ]


def _changes(view: View) -> list[Column]:
    """By how much the loss exceeds that of the unmodified model after its training length."""
    last = LOSS.at(protocol=LAST)
    known = last.at(length=home(view), method="")
    return [
        Column(f"change_{n}", f"after {format_length(n)}", last.at(length=n) - known)
        for n in lengths_of(view)
    ]


def _prefill(view: View) -> list[Column]:
    """Seconds, memory and pass keys at every length."""
    columns = []
    for n in lengths_of(view):
        at, name = {"protocol": PREFILL, "length": n}, format_length(n)
        columns += [
            _of_windows(f"seconds_{n}", f"{name}: s", SECONDS, at, np.median),
            _of_windows(f"bytes_{n}", f"{name}: MiB", PEAK, at, np.max),
            Column(f"keys_{n}", f"{name}: pass keys", plain=_keys(n)),
        ]
    return columns


def _of_windows(
    key: str, title: str, statistic: str, at: Where, combined: Callable[[Array], Any]
) -> Column:
    """One number of all windows: seconds, or bytes shown in MiB."""

    def estimated(view: View, row: Row) -> Estimate | None:
        sums = view.sums(statistic, {**row.where, **at})
        if sums is None:
            return None
        return Estimate(float(combined(sums.numerator)), units=len(sums.units))

    def text(known: Estimate) -> str:
        return f"{known.value:.1f}" if statistic == SECONDS else f"{known.value / 2**20:,.0f}"

    return estimate_column(key, title, estimated, text)


def _keys(length: int) -> Callable[[View, Row], Cell]:
    """In how many windows the pass key was found."""

    def cell(view: View, row: Row) -> Cell:
        where = {**row.where, "protocol": KEY, "length": length}
        estimate, sums = view.estimate(EXACT, where), view.sums(EXACT.name, where)
        if estimate is None or sums is None:
            return NOTHING
        return Cell(f"{sums.numerator.sum():.0f} of {sums.denominator.sum():.0f}", estimate)

    return cell


def _measured_notes(view: View) -> list[str]:
    said = [
        "s: the decoder over one whole window without a cache and without the head, the median "
        "over windows. MiB: the most that the process grew beyond what it held with the model "
        "loaded, of all windows."
    ]
    if view.values("unit", {"protocol": KEY}):
        said.append(
            "pass keys: one of five digits is stated in each window, at a depth of its own, and "
            "asked for at the end; it is found where greedy decoding would give every digit."
        )
    return said


def _advice(view: View) -> list[str]:
    """What to take, and what was scored."""
    scored = view.sums(LOSS.name, {"protocol": LAST, "length": lengths_of(view)[-1], "method": ""})
    start = f"Trained to read {train_length(view):,} tokens, not trained further."
    if scored is not None:
        count = scored.denominator[0, 0].sum()
        start += f" The last {count:,.0f} tokens of every window are scored."
    return [*advise(view).sentences, start]


def figures(view: View) -> list[Figure]:
    """What longer contexts do to the same last tokens, and the longest length by position."""
    title = (
        f"Nats above the unmodified model after {format_length(home(view))}, for the same last "
        f"tokens; the axis is linear within ±{LINEAR}"
    )
    panels = tuple(
        Panel(
            *(metric.title, _position_lines(view, metric), "tokens read", unit, True),
            train_length=train_length(view),
        )
        for metric, unit in ((LOSS, "nats"), (ACCURACY, "next tokens (%)"))
    )
    return [
        intervals(view, "last_segment", title, _rows(view), _changes(view), LINEAR),
        Curves("reading_by_position", "Your text, by position", panels, shared_y=False),
    ]


def _position_lines(view: View, metric: Metric) -> tuple[Line, ...]:
    """A line for each method; those that differ in log-n alone share a colour."""
    lines = []
    for method in methods_of(view):
        at = {"method": method, "protocol": POSITION}
        plotted = bin_points(view, metric, at, lambda bin_: bin_[3])
        family = method.removesuffix("-logn+") or UNMODIFIED
        if plotted:
            dashed = method not in ("", family)
            lines.append(Line(name_of(method), plotted, family, dashed=dashed))
    return tuple(lines)


def _table(key: str, title: str, columns: Any, notes: Any = ()) -> Table:
    """A table with a row for each method."""
    return Table(key, title, _rows, columns, notes=notes, head="method")


STUDY = Study(
    "extend",
    "How far does this model read this text, by which method, and at what cost?",
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
                _cost_column("change", "more than unmodified, %"),
            ),
        ),
        _table(
            "prefill",
            "Prefill time, peak memory, and pass keys found",
            *(_prefill, _measured_notes),
        ),
    ),
    figures=figures,
    summary=lambda view: advise(view).sentences[:2],
    collect=collect,
    made_by="normattn extend MODEL",
)

# Several models and texts

TEXT, MULTIPLE = "factor.text", "factor.multiple"


def gathered(places: Sequence[Path]) -> pl.DataFrame:
    """What `extend` has read in all these folders, with the text and the multiple of L of each row.

    Raises `InputError` where a folder is not one of `extend`, and where two hold the same model on
    texts of the same name.
    """
    folders: dict[tuple[str, str], Path] = {}
    parts = []
    for folder in places:
        text, measured = _text(folder), measurements.read(folder / measurements.FILE)
        for model in measured["row"].unique(maintain_order=True):
            if (model, text) in folders:
                both = f"{folders[model, text]} and {folder}"
                raise InputError(f"{both} both hold {model} on {text}")
            folders[model, text] = folder
        multiple = (pl.col("length") / pl.col("train_length")).alias(MULTIPLE)
        parts.append(measured.with_columns(pl.lit(text).alias(TEXT), multiple))
    return measurements.joined(parts).with_columns(pl.lit("gallery").alias("study"))


def settings(places: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """What each of these folders was read by, under the names of its model and text."""
    stored = [RunDirectory.existing(folder, KIND).config for folder in places]
    return {
        f"{Path(config['model']).stem}, {_text(folder)}": {
            name: value for name, value in config.items() if name not in ("model", "text")
        }
        for folder, config in zip(places, stored, strict=True)
    }


def _text(folder: Path) -> str:
    """The names of the files that were read."""
    given = RunDirectory.existing(folder, KIND).config["text"]
    return " + ".join(Path(file).name for file in ([given] if isinstance(given, str) else given))


def _subjects(view: View) -> list[Where]:
    """Every model on every text, by name: a table comes back from its file in another order."""
    return [
        {"row": model, TEXT: text}
        for model in sorted(view.values("row"))
        for text in sorted(view.values(TEXT, {"row": model}))
    ]


def _of(view: View, subject: Where) -> View:
    """What is known of one model on one text."""
    return View(select(view.frame, subject), view.bootstrap)


def _gallery_rows(view: View) -> list[Row]:
    return [
        Row(f"{subject['row']}, {subject[TEXT]}: {name_of(method)}", {**subject, "method": method})
        for subject in _subjects(view)
        for method in methods_of(_of(view, subject))
    ]


def _losses(view: View) -> list[Column]:
    """The loss after contexts of every multiple of L, what the longest one takes, and more."""
    multiples = sorted(view.values(MULTIPLE, {"protocol": LAST}))
    titles = {m: "L" if m == 1 else f"{m:g} L" for m in multiples}
    longest = multiples[-1]
    known = max((multiple for multiple in multiples if multiple <= 1), default=multiples[0])
    last = LOSS.at(protocol=LAST)
    change = last.at({MULTIPLE: longest}) - last.at({MULTIPLE: known}, method="")
    keys = EXACT.at({MULTIPLE: longest}, protocol=KEY)
    return [
        *(Column(f"loss_{m:g}", f"after {titles[m]}", last.at({MULTIPLE: m})) for m in multiples),
        Column("change", f"{titles[longest]} above unmodified at {titles[known]}", change),
        _cost_column("cost", "cost at L, %"),
        Column("keys", f"pass keys at {titles[longest]}, %", keys),
        PARAMETERS,
    ]


def _gallery_advice(view: View) -> list[str]:
    said = []
    for subject in _subjects(view):
        part = _of(view, subject)
        windows = part.frame.filter(pl.col("protocol") == LAST)["unit"].n_unique()
        said.append(
            f"{subject['row']} on {subject[TEXT]} ({windows} windows, L = "
            f"{train_length(part):,}): {advise(part).sentences[0]}"
        )
    return said


def _gallery_figures(view: View) -> list[Figure]:
    """The loss of the same last tokens after every multiple of L, and what the longest takes."""
    losses = [column for column in _losses(view) if column.metric and column.metric.name == "loss"]
    title = "Loss of the same last tokens as the context before them grows (nats)"
    return [intervals(view, "gallery", title, _gallery_rows(view), losses)]


GALLERY = Study(
    "gallery",
    "How far do existing models read, on several texts, by which inference-time method, at what "
    "cost?",
    title="Pretrained models past their training length",
    help="How far pretrained models handle longer text, on several texts.",
    sources=SOURCES,
    tables=(
        Table(
            "table",
            "Loss on the same final tokens after longer contexts (nats); L is the training length",
            _gallery_rows,
            _losses,
            notes=_gallery_advice,
            head="model, text: method",
        ),
    ),
    figures=_gallery_figures,
    made_by="normattn report FOLDER FOLDER …",
)

"""Which inference-time methods let existing models handle longer text, and at what cost?

*extend*: `normattn extend MODEL` evaluates every method on the same windows of the user's text. A
shorter length is the end of a window, so the same final tokens are scored after every context. A
method is recommended in sentences, with the numbers behind them.

*gallery*: `normattn report` of several such folders compares models and texts. Lengths are
multiples of each model's training length L.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from normattn.lab.stats.arrays import Where
from normattn.lab.stats.estimates import LEAST_UNITS
from normattn.lab.stats.metrics import ratio
from normattn.lab.studies.base import Study
from normattn.lab.studies.lm_report import interval_figure, methods_by_position, ranked
from normattn.score.spec import UNMODIFIED

KIND, MEASUREMENTS = "extend", "measurements"
LAST, TRAIN, KEY, PREFILL = "last_segment", "train_length", "retrieval", "prefill"
SECONDS, PEAK = "prefill_seconds", "peak_bytes"
LOSS, ACCURACY = Metric("loss"), Metric("accuracy")
EXACT = Metric("exact", "pass keys found", ratio(100.0), "%", 1)
LEAST_GAIN = 0.01
"""The smallest gain that justifies changing a model: nats per token, 1 % of perplexity."""
LINEAR = 0.1
"""Nats up to which the axis of changes is linear; beyond, it is logarithmic."""
SOURCES = ("kexue.fm/archives/9708", "arXiv:2309.00071", "arXiv:2401.01325")

# Measurements


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


def methods_of(view: View) -> list[str]:
    """The evaluated methods, the unmodified model first."""
    return ranked(view.values("method"), ("",))


def lengths_of(view: View) -> list[int]:
    """The evaluated lengths, ascending."""
    return sorted(view.values("length", {"protocol": LAST}))


def train_length(view: View) -> int:
    """The model's training length."""
    return int(view.frame["train_length"][0])


def home_length(view: View) -> int:
    """The longest evaluated length up to the training length, or else the shortest."""
    lengths, trained = lengths_of(view), train_length(view)
    return max((length for length in lengths if length <= trained), default=min(lengths))


def format_length(length: int) -> str:
    """8192 as `8k`, 12000 as `12,000`."""
    return f"{length // 1024}k" if length % 1024 == 0 else f"{length:,}"


def with_parameters(view: View, row: Row) -> str | None:
    """The row's method, written with all its parameters; None for the unmodified model."""
    method = row.where["method"]
    return str(view.only_value("score", row.where) or method) if method else None


def cost_at_train_length(view: View, row: Row) -> Estimate | None:
    """The increase in loss at the training length, in percent, by the row's method.

    Paired over windows; the interval does not include the uncertainty of the unmodified model's
    loss. None where either loss was not measured.
    """
    at_l = LOSS.at(protocol=TRAIN)
    unmodified = view.estimate(at_l.at(method=""), row.where)
    change = view.estimate(at_l - at_l.at(method=""), row.where)
    if unmodified is None or change is None:
        return None
    scale = 100 / unmodified.value
    low, high = (None if end is None else end * scale for end in (change.low, change.high))
    per_seed = tuple(value * scale for value in change.per_seed)
    return replace(change, value=change.value * scale, low=low, high=high, per_seed=per_seed)


# Advice


class Advice(NamedTuple):
    """The recommendation as sentences; `method` as typed, None for the unmodified model."""

    sentences: tuple[str, ...]
    method: str | None


class _Best(NamedTuple):
    """The method with the lowest loss at a length; `gain` is against the unmodified model.

    `better`: the interval of the gain is below 0, and the gain at least `LEAST_GAIN`.
    """

    length: int
    method: str
    loss: Estimate
    gain: Estimate | None
    better: bool


def advise(view: View) -> Advice:
    """Recommend the method with the lowest loss on the same final tokens at the longest length.

    A method is better than the unmodified model where the interval of their paired difference is
    below 0 and the gain is at least `LEAST_GAIN`. More sentences name the best method per length.
    """
    winners = [best for length in lengths_of(view) if (best := _best(view, length))]
    if not winners or "" not in methods_of(view):
        return Advice(
            ("No method can be recommended: the unmodified model was not evaluated.",), None
        )
    last, trained = winners[-1], format_length(train_length(view))
    cost = cost_at_train_length(view, Row("", {"method": last.method}))
    sentences = [_headline(view, winners, cost), *map(_sentence, reversed(winners))]
    if last.loss.units < LEAST_UNITS:
        sentences.append(f"With {_windows(last.loss.units)}, no result is reliable: take more.")
    if last.better and cost is not None and cost.above_zero:
        sentences.append(f"Up to {trained} tokens the loss is lower without the method.")
    return Advice(tuple(sentences), last.method if last.better else None)


def _best(view: View, length: int) -> _Best | None:
    last = LOSS.at(protocol=LAST, length=length)
    estimates = {method: view.estimate(last.at(method=method)) for method in methods_of(view)}
    losses = {method: loss for method, loss in estimates.items() if loss is not None}
    if not losses:
        return None
    best = min(losses, key=lambda method: losses[method].value)
    gain = view.estimate(last.at(method=best) - last.at(method=""))
    better = gain is not None and gain.below_zero and gain.value <= -LEAST_GAIN
    return _Best(length, best, losses[best], gain, better)


def _headline(view: View, winners: Sequence[_Best], cost: Estimate | None) -> str:
    """The recommended method, the lengths where it is best, and its cost on short text."""
    last, trained = winners[-1], train_length(view)
    longest, method = format_length(last.length), last.method
    if not last.better:
        return f"No method is clearly better than the unmodified model at {longest} tokens."
    parameters = with_parameters(view, Row("", {"method": method}))
    name = method if parameters == method else f"{method} ({parameters})"
    others = max((b.length for b in winners if b.method != method or not b.better), default=0)
    since = min(best.length for best in winners if best.length > others)
    span = "at" if since == last.length else f"from {format_length(since)} to"
    if others <= trained:  # shorter text needs no method
        span = "up to"
    costs = "its cost on short text was not measured"
    if cost is not None:
        costs = f"loss at {format_length(trained)} {format_estimate(cost, signed=True)} %"
    return f"{name}: best {span} {longest} tokens; {costs}."


def _sentence(best: _Best) -> str:
    """The lowest loss at a length, and whether it is clearly below the unmodified model's."""
    lowest = f"{best.method or UNMODIFIED}, {format_estimate(best.loss, digits=3)} nats"
    if best.gain is not None:
        lowest += f", {format_estimate(best.gain, signed=True, digits=3)} to the unmodified model"
    if best.loss.units < LEAST_UNITS:
        lowest += f"; {_windows(best.loss.units)}, so no interval"
    elif best.gain is not None and not best.better:
        lowest += ", too small or uncertain a gain"
    return f"Lowest loss at {format_length(best.length)} tokens: {lowest}."


def _windows(count: int) -> str:
    return "one window" if count == 1 else f"{count} windows"


# Tables and figures


def _rows(view: View) -> list[Row]:
    return [Row(method or UNMODIFIED, {"method": method}) for method in methods_of(view)]


PARAMETERS = text_column("parameters", "with all parameters", with_parameters)


def _cost_column(key: str, title: str) -> Column:
    return estimate_column(
        *(key, title, cost_at_train_length), lambda cost: format_estimate(cost, 2, signed=True)
    )


def _by_length(metric: Metric) -> Callable[[View], list[Column]]:
    """Columns of the metric on the same final tokens, one for every length."""
    return lambda view: [
        Column(f"{metric.name}_{n}", format_length(n), metric.at(protocol=LAST, length=n))
        for n in lengths_of(view)
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
    """Seconds (median) and peak memory (maximum) over all windows, and the pass keys found."""

    def cell(statistic: str, length: int, view: View, row: Row) -> Cell:
        protocol = KEY if statistic == EXACT.name else PREFILL
        where = {**row.where, "protocol": protocol, "length": length}
        sums = view.sums(statistic, where)
        if sums is None:
            return EMPTY_CELL
        if protocol == KEY:
            found = f"{sums.numerator.sum():.0f} of {sums.denominator.sum():.0f}"
            return Cell(found, view.estimate(EXACT, where))
        reduce = np.median if statistic == SECONDS else np.max
        value = float(reduce(sums.numerator))
        text = f"{value:.1f}" if statistic == SECONDS else f"{value / 2**20:,.0f}"
        return Cell(text, Estimate(value, units=len(sums.units)))

    shown = {"seconds": (SECONDS, "s"), "bytes": (PEAK, "MiB"), "keys": (EXACT.name, "pass keys")}
    return [
        Column(f"{key}_{n}", f"{format_length(n)}: {title}", plain=partial(cell, statistic, n))
        for n in lengths_of(view)
        for key, (statistic, title) in shown.items()
    ]


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


_table = partial(Table, rows=_rows, head="method")

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
            columns=lambda view: [*_by_length(LOSS)(view), PARAMETERS],
            notes=_advice,
        ),
        _table(
            "change",
            "Extra loss over the unmodified model at its training length (nats, paired over "
            "windows)",
            columns=_changes,
        ),
        _table("accuracy", "Accuracy on the same final tokens (%)", columns=_by_length(ACCURACY)),
        _table(
            "cost",
            "Cost at the training length",
            columns=(
                Column("loss", "loss, nats", LOSS.at(protocol=TRAIN)),
                _cost_column("change", "increase over unmodified, %"),
            ),
        ),
        _table(
            "prefill",
            "Prefill time, peak memory, and pass keys found",
            columns=_prefill,
            notes=_prefill_notes,
        ),
    ),
    figures=figures,
    summary=lambda view: advise(view).sentences[:2],
    collect=collect,
    made_by="normattn extend MODEL",
)

# Several models and texts

TEXT, MULTIPLE = "factor.text", "factor.multiple"


def combine(folders: Sequence[Path]) -> tuple[pl.DataFrame, dict[str, Any]]:
    """(measurements, settings) of several folders of `extend`.

    Each row has its text and its multiple of L; settings are by the names of model and text. Raises
    `InputError` where a folder is not from `extend`, and where two have the same model on texts of
    the same name.
    """
    sources: dict[tuple[str, str], Path] = {}
    parts, settings = [], {}
    for folder in folders:
        config = dict(RunDirectory.existing(folder, KIND).config)
        model_file, files = Path(config.pop("model")), config.pop("text")
        text = " + ".join(Path(f).name for f in ([files] if isinstance(files, str) else files))
        settings[f"{model_file.stem}, {text}"] = config
        measured = measurements.read(folder / measurements.FILE)
        for model in measured["row"].unique(maintain_order=True):
            if (model, text) in sources:
                both = f"{sources[model, text]} and {folder}"
                raise InputError(f"{both} both hold {model} on {text}")
            sources[model, text] = folder
        multiple = (pl.col("length") / pl.col("train_length")).alias(MULTIPLE)
        parts.append(measured.with_columns(pl.lit(text).alias(TEXT), multiple))
    return measurements.concat(parts).with_columns(pl.lit("gallery").alias("study")), settings


def _subjects(view: View) -> list[tuple[Where, View]]:
    """Every model on every text with its measurements, sorted, as rows of a file may not be."""
    places = [
        {"row": model, TEXT: text}
        for model in sorted(view.values("row"))
        for text in sorted(view.values(TEXT, {"row": model}))
    ]
    return [(place, View(select(view.frame, place))) for place in places]


def _gallery_rows(view: View) -> list[Row]:
    return [
        Row(f"{place['row']}, {place[TEXT]}: {method or UNMODIFIED}", {**place, "method": method})
        for place, measured in _subjects(view)
        for method in methods_of(measured)
    ]


def _losses(view: View) -> list[Column]:
    multiples = sorted(view.values(MULTIPLE, {"protocol": LAST}))
    longest, last = multiples[-1], LOSS.at(protocol=LAST)
    home = max((multiple for multiple in multiples if multiple <= 1), default=multiples[0])
    change = last.at({MULTIPLE: longest}) - last.at({MULTIPLE: home}, method="")
    keys = EXACT.at({MULTIPLE: longest}, protocol=KEY)
    return [
        *(Column(f"loss_{m:g}", f"after {m:g} ×", last.at({MULTIPLE: m})) for m in multiples),
        Column("change", f"{longest:g} × above unmodified at {home:g} ×", change),
        _cost_column("cost", "cost on short text, %"),
        Column("keys", f"pass keys at {longest:g} ×, %", keys),
        PARAMETERS,
    ]


def _gallery_advice(view: View) -> list[str]:
    sentences = []
    for place, measured in _subjects(view):
        windows = measured.frame.filter(pl.col("protocol") == LAST)["unit"].n_unique()
        sentences.append(
            f"{place['row']} on {place[TEXT]} ({windows} windows, L = "
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

"""How far do existing models read, on several texts, by which post-hoc method, at what cost?

`normattn extend MODEL --text TEXT` reads one model on one text; `normattn report` of several such
folders puts them side by side. Lengths are compared as multiples of each model's training length L.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from normattn.errors import InputError
from normattn.lab.report.figure import Figure
from normattn.lab.report.page import Page
from normattn.lab.report.table import NOTHING, Cell, Column, Row, Table, shown
from normattn.lab.report.view import View
from normattn.lab.runs import RunDirectory
from normattn.lab.stats import measurements
from normattn.lab.stats.arrays import Where
from normattn.lab.studies._advice import (
    LAST,
    LOSS,
    advise,
    cost_at_train_length,
    methods_of,
    name_of,
    resolved,
)
from normattn.lab.studies.base import intervals
from normattn.lab.studies.extend import EXACT, KEY, collect
from normattn.lab.studies.extend import KIND as OF_EXTEND
from normattn.lab.studies.extend import MEASUREMENTS as OF_WINDOWS
from normattn.lab.sweep.study import Study, measured_by

KIND, TEXT, MULTIPLE = "gallery", "factor.text", "factor.multiple"


def gathered(places: Sequence[Path]) -> pl.DataFrame:
    """What `extend` has read in all these folders, with the text and the multiple of L of each row.

    Raises `InputError` where a folder is not one of `extend`, and where two hold the same model on
    texts of the same name.
    """
    folders: dict[tuple[str, str], Path] = {}
    parts = []
    for folder in places:
        text = _text(folder)
        measured = (
            collect(folder)
            if (folder / OF_WINDOWS).is_dir()
            else measurements.read(folder / measurements.FILE)
        )
        for model in measured["row"].unique(maintain_order=True):
            if (model, text) in folders:
                both = f"{folders[model, text]} and {folder}"
                raise InputError(f"{both} both hold {model} on {text}")
            folders[model, text] = folder
        parts.append(
            measured.with_columns(
                pl.lit(text).alias(TEXT),
                (pl.col("length") / pl.col("train_length")).alias(MULTIPLE),
            )
        )
    return measurements.joined(parts).with_columns(pl.lit(KIND).alias("study"))


def settings(places: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """What each of these folders was read by, under the names of its model and text."""
    stored = [RunDirectory.existing(folder, OF_EXTEND).config for folder in places]
    return {
        f"{Path(config['model']).stem}, {_text(folder)}": {
            name: value for name, value in config.items() if name not in ("model", "text")
        }
        for folder, config in zip(places, stored, strict=True)
    }


def _text(folder: Path) -> str:
    """The names of the files that were read."""
    given = RunDirectory.existing(folder, OF_EXTEND).config["text"]
    return " + ".join(Path(file).name for file in ([given] if isinstance(given, str) else given))


def _multiples(view: View) -> list[float]:
    return sorted(view.values(MULTIPLE, {"protocol": LAST}))


def _subjects(view: View) -> list[Where]:
    """Every model on every text, by name: a frame comes back from its file in another order."""
    models = sorted(view.values("row"))
    return [
        {"row": model, TEXT: text}
        for model in models
        for text in sorted(view.values(TEXT, {"row": model}))
    ]


def _of(view: View, subject: Where) -> View:
    """What is known of one model on one text."""
    rows = view.frame.filter(*(pl.col(name) == value for name, value in subject.items()))
    return View(rows, view.bootstrap)


def _rows(view: View) -> list[Row]:
    return [
        Row(f"{subject['row']}, {subject[TEXT]}: {name_of(method)}", {**subject, "method": method})
        for subject in _subjects(view)
        for method in methods_of(_of(view, subject))
    ]


def _spoken(multiple: float) -> str:
    return "L" if multiple == 1 else f"{multiple:g} L"


def _losses(view: View) -> list[Column]:
    """The loss after contexts of every multiple of L, what the longest one takes, and more."""
    losses = [Column("parameters", "with its parameters", plain=_with_parameters)]
    for multiple in _multiples(view):
        at = LOSS.at({MULTIPLE: multiple}, protocol=LAST)
        losses.append(Column(f"loss_{multiple:g}", f"after {_spoken(multiple)}", at))
    return [
        *losses,
        _change(_multiples(view)),
        Column("cost", "cost at L, %", plain=_cost),
        *_keys(view),
    ]


def _change(multiples: Sequence[float]) -> Column:
    """By how much the loss after the longest context lies above that of the model as it is at L."""
    known = max((multiple for multiple in multiples if multiple <= 1), default=multiples[0])
    title = f"{_spoken(multiples[-1])} above as is at {_spoken(known)}"
    last = LOSS.at(protocol=LAST)
    change = last.at({MULTIPLE: multiples[-1]}) - last.at({MULTIPLE: known}, method="")
    return Column("change", title, change)


def _with_parameters(view: View, row: Row) -> Cell:
    method = str(row.where["method"])
    return Cell(resolved(_of(view, _subject(row)), method)) if method else NOTHING


def _cost(view: View, row: Row) -> Cell:
    cost = cost_at_train_length(_of(view, _subject(row)), str(row.where["method"]))
    return NOTHING if cost is None else Cell(shown(cost, 2, signed=True), cost)


def _subject(row: Row) -> Where:
    return {name: row.where[name] for name in ("row", TEXT)}


def _keys(view: View) -> list[Column]:
    """Pass keys found at the longest multiple."""
    longest = _multiples(view)[-1]
    at = EXACT.at({MULTIPLE: longest}, protocol=KEY)
    return [Column("keys", f"pass keys at {_spoken(longest)}, %", at)]


def _advice(view: View) -> list[str]:
    said = []
    for subject in _subjects(view):
        part = _of(view, subject)
        windows = part.frame.filter(pl.col("protocol") == LAST)["unit"].n_unique()
        trained = int(part.frame["train_length"][0])
        said.append(
            f"{subject['row']} on {subject[TEXT]} ({windows} windows, L = {trained:,}): "
            f"{advise(part).sentences[0]}"
        )
    return said


def figures(view: View) -> list[Figure]:
    """The loss of the same last tokens after every multiple of L, and what the longest takes."""
    losses = [column for column in _losses(view) if column.metric and column.metric.name == "loss"]
    title = "Loss of the same last tokens as the context before them grows (nats)"
    return [intervals(view, "gallery", title, _rows(view), losses)]


PAGE = Page(
    title="Existing models past their training length",
    question="How far do existing models read, on several texts, by which post-hoc method, at what "
    "cost?",
    sources=("kexue.fm/archives/9708", "arXiv:2309.00071", "arXiv:2401.01325"),
    tables=(
        Table(
            "table",
            "Loss on the same last tokens after longer contexts (nats); L is the training length",
            _rows,
            _losses,
            notes=_advice,
            head="model, text: method",
        ),
    ),
    figures=figures,
)

STUDY = Study(
    name=KIND,
    help="How far existing models read past their training length, on several texts.",
    resolve=measured_by("normattn report of several folders of normattn extend"),
    cells=(),
    page=PAGE,
    made_by="normattn report FOLDER FOLDER …",
)

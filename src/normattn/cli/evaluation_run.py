"""One finished run measured by itself, and what was found printed as a table."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import polars as pl
import torch
from rich.table import Column, Table

from normattn.cli.options.evaluate import EvaluateOptions
from normattn.errors import InputError, unknown
from normattn.lab.data.tokens import prepare_tokens
from normattn.lab.report.terminal import tell
from normattn.lab.runs import RunDirectory, require_finished
from normattn.lab.stats import MeasurementStore
from normattn.lab.studies.base import label
from normattn.lab.studies.reading import TASKS
from normattn.lab.sweep.layout import is_of_a_study
from normattn.lab.sweep.measuring import (
    EVALUATIONS,
    asked_alone,
    count_evaluations,
    evaluate_trained,
)
from normattn.lab.sweep.methods import ALL, left_out, post_hoc_methods
from normattn.lab.sweep.settings import PROTOCOLS, EvaluationSettings, Protocol, validated
from normattn.lab.training import TrainingConfig
from normattn.lab.training.tasks.text import CausalWorkload
from normattn.score import ScoreSpec
from normattn.terminal import Console


def evaluate_run(asked: EvaluateOptions) -> None:
    """Evaluate the run in the directory `asked.run` and print what was measured.

    "all" among the methods is the model as it is and every registered post-hoc method that its
    score can take; a sentence is printed for each that it cannot. Raises `InputError` for a
    directory that holds no finished run, an unknown protocol or method, and lengths that are no
    multiples of the training length or too short for what is asked.
    """
    run = asked.run
    stored = RunDirectory.existing(run, CausalWorkload.kind)
    config = TrainingConfig.parse(stored.config, str(run / "config.json"))
    fields = {
        "protocols": [_protocol(name) for name in asked.protocols or PROTOCOLS],
        "multiples": _multiples(asked, config.model.train_length),
        "max_windows": asked.max_windows,
        "max_tokens": asked.max_tokens,
        "seed": asked.seed,
    }
    settings = validated(EvaluationSettings, fields, "evaluation settings")
    score = config.model.score.resolve(train_length=config.model.train_length)
    methods, sentences = _methods(asked.methods, score, settings.factor)
    for method in methods:
        score.with_method(method).resolve(factor=settings.factor)
    for sentence in sentences:
        tell(sentence)
    torch.set_num_threads(asked.threads)
    total = count_evaluations(settings) * len(methods)

    require_finished(run, "be evaluated")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("normattn evaluate runs in one process; start it without torchrun")
    with Console(file=sys.stderr).status("evaluating") as status:
        measured = evaluate_trained(
            run,
            config,
            prepare_tokens(config.data),
            methods=methods,
            settings=settings,
            on_done=lambda done: status.update(f"evaluating: {done} of {total}"),
            store=_records_of(run),
        )
    _show(measured)


def _records_of(run: Path) -> MeasurementStore:
    """Where the command keeps what it measured: beside a study's records, whose page is its own."""
    return asked_alone(run) if is_of_a_study(run) else MeasurementStore(run / EVALUATIONS)


def _methods(
    asked: Sequence[str], score: ScoreSpec, factor: float
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The methods with "all" written out, each once, and what was left out of "all" and why."""
    every = ("as is", *post_hoc_methods(score, factor))
    names = [name for method in asked for name in (every if method == ALL else (method,))]
    sentences = left_out(score, factor) if ALL in asked else ()
    return tuple(dict.fromkeys(names)), sentences


def _protocol(name: str) -> str:
    plain, protocols = name.replace("-", "_"), get_args(Protocol)
    if plain not in protocols:
        raise unknown("protocol", name, (protocol.replace("_", "-") for protocol in protocols))
    return plain


def _multiples(asked: EvaluateOptions, train_length: int) -> list[int]:
    lengths = asked.lengths
    if asked.multiples is not None and lengths is not None:
        raise InputError("--multiples and --lengths say the same thing twice; give one of them")
    if lengths is None:
        return list(asked.multiples or EvaluationSettings().multiples)
    for length in lengths:
        if length % train_length:
            raise InputError(
                f"--lengths takes multiples of the run's training length {train_length}, "
                f"got {length}"
            )
    return [length // train_length for length in lengths]


def _show(measured: pl.DataFrame) -> None:
    """Tables of accuracies and losses; intervals come with `normattn report`."""
    counted = measured.filter(pl.col("protocol") != "retrieval")
    asked = measured.filter(pl.col("protocol") == "retrieval")
    console = Console(highlight=False)
    if counted.height:
        console.print(_reading_table(counted))
    if asked.height:
        console.print(_retrieval_table(asked))


def _totals(measured: pl.DataFrame, *places: str) -> list[dict[str, Any]]:
    """Σ sum and Σ of of every statistic, a dictionary for each row and place."""
    keys = ["row", "method", *places, "length"]
    added = measured.group_by(*keys, "statistic", maintain_order=True).agg(
        pl.col("sum").sum(), pl.col("of").sum()
    )
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in added.iter_rows(named=True):
        key = tuple(line[name] for name in keys)
        fields = rows.setdefault(key, {name: line[name] for name in keys})
        fields[line["statistic"]] = (line["sum"], line["of"])
    return list(rows.values())


def _reading_table(counted: pl.DataFrame) -> Table:
    def cells(line: Mapping[str, Any]) -> tuple[str, ...]:
        (correct, tokens), (nats, _) = line["accuracy"], line["loss"]
        shares = (f"{100 * correct / tokens:.2f}", f"{nats / tokens:.4f}")
        return (line["protocol"], str(line["length"]), f"{tokens:,.0f}", *shares)

    head = ("protocol", "length", "tokens", "accuracy, %", "loss, nats")
    return _table(_totals(counted, "protocol"), head, cells)


def _retrieval_table(asked: pl.DataFrame) -> Table:
    def cells(line: Mapping[str, Any]) -> tuple[str, ...]:
        (right, answers), (correct, tokens) = line["exact"], line["accuracy"]
        shares = (f"{100 * right / answers:.1f}", f"{100 * correct / tokens:.1f}")
        return (TASKS[line["factor.task"]], str(line["length"]), f"{answers:.0f}", *shares)

    head = ("task", "length", "answers", "right, %", "tokens, %")
    return _table(_totals(asked, "factor.task"), head, cells)


def _table(
    lines: Sequence[Mapping[str, Any]],
    head: Sequence[str],
    cells: Callable[[Mapping[str, Any]], Sequence[str]],
) -> Table:
    """A line for each row of the page; the names in full, for scores differ at their ends."""
    names = [label(line["row"], line["method"]) for line in lines]
    table = Table(Column("score", min_width=max(map(len, names))), *head)
    for name, line in zip(names, lines, strict=True):
        table.add_row(name, *cells(line))
    return table

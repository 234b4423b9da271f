"""`normattn evaluate`: one finished run measured, its page written and its numbers printed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import polars as pl
import torch
from rich.table import Column, Table

from normattn.cli.options.evaluate import EvaluateOptions
from normattn.cli.report_runs import of_runs
from normattn.errors import InputError, unknown
from normattn.lab.data.tokens import prepare_tokens
from normattn.lab.report.terminal import say, tell
from normattn.lab.runs import RunDirectory, require_finished
from normattn.lab.stats import MeasurementStore
from normattn.lab.studies import find
from normattn.lab.studies.language import (
    asked_alone,
    evaluate_trained,
    set_lengths,
)
from normattn.lab.studies.methods import ALL, left_out, post_hoc_methods
from normattn.lab.studies.preset import PROTOCOLS, EvaluationSettings, Protocol
from normattn.lab.sweep.config import validated
from normattn.lab.sweep.paths import is_of_a_study
from normattn.lab.sweep.run import EVALUATIONS
from normattn.lab.training import TrainingConfig
from normattn.lab.training.tasks.text import CausalWorkload
from normattn.score import ScoreSpec
from normattn.terminal import Console

TASK = "factor.task"
PAGE = "report"
"""The folder of a run that takes the page of its evaluations."""


def evaluate_run(asked: EvaluateOptions) -> None:
    """Evaluate the run in the directory `asked.run` and report all that is on record of it.

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
    total = len(set_lengths(settings)) * len(methods)

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
    _report(run, measured)


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


def _report(run: Path, measured: pl.DataFrame) -> None:
    """Print what was measured, and write the page of all that is on record of the run.

    Records that do not compare, as of two factors of one method, have no page together.
    """
    study, out = find("reading"), run / PAGE
    _show(measured)
    sentences = _in_short(measured)
    try:
        written = study.report(of_runs([(None, run)]), out, {})
    except InputError as error:
        tell("In short")
        for sentence in [*sentences, f"There is no page of all records: {error}."]:
            tell(f"  {sentence}")
    else:
        say(out, replace(written, summary=(*written.summary, *sentences)))


def _show(measured: pl.DataFrame) -> None:
    """A line for every score, protocol and length; intervals are on the page."""
    task = pl.col(TASK) if TASK in measured.columns else pl.lit(None, pl.String)
    keys = ["row", "method", "protocol", "length"]
    named = measured.with_columns(pl.coalesce(task, "protocol").alias("protocol"))
    added = named.group_by(*keys, "statistic", maintain_order=True).agg(
        pl.col("sum").sum(), pl.col("of").sum()
    )
    table = Table(Column("score", no_wrap=True), "protocol", "length", "accuracy, %", "loss, nats")
    for (row, method, protocol, length), lines in added.group_by(*keys, maintain_order=True):
        found = {
            line["statistic"]: line["sum"] / line["of"] for line in lines.iter_rows(named=True)
        }
        right, loss = (found.get(name) for name in ("accuracy", "loss"))
        table.add_row(
            f"{row}-{method}" if method else str(row),
            f"{protocol}",
            f"{length:,}",
            "" if right is None else f"{100 * right:.2f}",
            "" if loss is None else f"{loss:.4f}",
        )
    Console(highlight=False).print(table)


def _in_short(measured: pl.DataFrame) -> list[str]:
    """The accuracy of every protocol at its longest length, unmodified and by the best method."""
    right = measured.filter(pl.col("statistic") == "accuracy")
    longest = right.filter(pl.col("length") == pl.col("length").max().over("protocol"))
    shares = longest.group_by("protocol", "length", "method", maintain_order=True).agg(
        (100 * pl.col("sum").sum() / pl.col("of").sum()).alias("share")
    )
    sentences = []
    for (protocol, length), rows in shares.group_by("protocol", "length", maintain_order=True):
        found = dict(rows.select("method", "share").iter_rows())
        words = [f"{found['']:.1f} % unmodified"] if "" in found else []
        methods = {method: share for method, share in found.items() if method}
        if methods:
            best = max(methods, key=methods.__getitem__)
            words.append(f"{methods[best]:.1f} % with {best}, the best of {len(methods)}")
        sentences.append(f"Accuracy, {protocol}, {length:,} tokens: {'; '.join(words)}.")
    return sentences

"""`normattn evaluate`: evaluate a finished run, write its page and print its numbers."""

from __future__ import annotations

import os
import sys
from typing import get_args

import polars as pl
import torch
from rich.table import Column, Table

from normattn.cli import options
from normattn.cli.report_runs import measured_of_runs
from normattn.errors import InputError, unknown_name
from normattn.lab.data.tokens import prepare_tokens
from normattn.lab.report.terminal import print_line, print_report
from normattn.lab.runs import RunDirectory, require_finished
from normattn.lab.stats import MeasurementStore
from normattn.lab.studies import find
from normattn.lab.studies.language import (
    ALL,
    candidates,
    evaluate_finished_run,
    set_lengths,
    standalone_store,
    supported_methods,
)
from normattn.lab.studies.preset import PROTOCOLS, EvaluationSettings, Protocol
from normattn.lab.sweep.paths import belongs_to_study
from normattn.lab.sweep.run import EVALUATIONS
from normattn.lab.training import TrainingConfig
from normattn.score.spec import UNMODIFIED, is_unmodified
from normattn.terminal import Console

PAGE = "report"
"""The folder in a run that holds the page of its evaluations."""


def evaluate_run(args: options.Evaluate) -> None:
    """Evaluate the run in the directory `args.run`, and report all its measurements."""
    run = args.run
    stored = RunDirectory.existing(run, TrainingConfig.kind)
    config = TrainingConfig.parse(stored.config, str(run / "config.json"))
    train_length = config.model.train_length
    settings = _read_settings(args)
    score = config.model.score.resolve(train_length=train_length)
    methods = list(args.methods)
    if ALL in methods:
        supported, sentences = supported_methods(
            score, (UNMODIFIED, *candidates()), settings.factor
        )
        methods[methods.index(ALL) : methods.index(ALL) + 1] = supported
        for sentence in sentences:
            print_line(sentence)
    methods = list(dict.fromkeys("" if is_unmodified(name) else name for name in methods))
    for method in methods:
        score.with_method(method).resolve(factor=settings.factor)
    require_finished(run, "be evaluated")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("normattn evaluate runs in one process; start it without torchrun")
    torch.set_num_threads(args.threads)
    total = len(set_lengths(settings)) * len(methods)
    # A study's page must not change, so new measurements of its runs go to another store.
    store = standalone_store(run) if belongs_to_study(run) else MeasurementStore(run / EVALUATIONS)
    with Console(file=sys.stderr).status("evaluating") as status:
        measured = evaluate_finished_run(
            run,
            config,
            prepare_tokens(config.data),
            methods=methods,
            settings=settings,
            on_done=lambda done: status.update(f"evaluating: {done} of {total}"),
            store=store,
        )
    _print_numbers(measured)
    try:
        written = find("reading").report(measured_of_runs([(None, run)]), run / PAGE, {})
    except InputError as error:
        print_line(f"There is no page of all records: {error}.")
    else:
        print_report(run / PAGE, written)


def _read_settings(args: options.Evaluate) -> EvaluationSettings:
    known = [protocol.replace("_", "-") for protocol in get_args(Protocol)]
    for name in args.protocols or ():
        if name.replace("_", "-") not in known:
            raise unknown_name("protocol", name, known)
    fields = {
        "protocols": [name.replace("-", "_") for name in args.protocols or PROTOCOLS],
        "multiples": args.multiples or EvaluationSettings().multiples,
        "max_windows": args.max_windows,
        "max_tokens": args.max_tokens,
        "seed": args.seed,
    }
    settings = EvaluationSettings.parse(fields, "evaluation settings")
    longer = args.protocols and {"non_repeated", "repeated"}.intersection(settings.protocols)
    if longer and settings.multiples == (1,):
        raise InputError("--protocols non-repeated and repeated need one of --multiples above 1")
    return settings


def _print_numbers(measured: pl.DataFrame) -> None:
    task = pl.col("factor.task") if "factor.task" in measured.columns else pl.lit(None, pl.String)
    keys = ["row", "method", "protocol", "length"]
    named = measured.with_columns(pl.coalesce(task, "protocol").alias("protocol"))
    values = named.group_by(*keys, "statistic", maintain_order=True).agg(
        (pl.col("sum").sum() / pl.col("of").sum()).alias("value")
    )
    columns = (Column("score", no_wrap=True), Column("protocol", overflow="fold"))
    table = Table(*columns, "length", "accuracy, %", "loss, nats")
    for (row, method, protocol, length), lines in values.group_by(*keys, maintain_order=True):
        statistics = dict(lines.select("statistic", "value").iter_rows())
        accuracy, loss = statistics.get("accuracy"), statistics.get("loss")
        table.add_row(
            *(f"{row}-{method}" if method else str(row), str(protocol), f"{length:,}"),
            "" if accuracy is None else f"{100 * accuracy:.2f}",
            "" if loss is None else f"{loss:.4f}",
        )
    Console(highlight=False).print(table)

"""One finished run measured by itself, and what was found printed as a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from normattn.data.tokens import prepare_tokens
from normattn.errors import InputError
from normattn.recipes.measuring import count_evaluations, evaluate_trained
from normattn.recipes.settings import PROTOCOLS, EvaluationSettings, validated
from normattn.reports.records import Record
from normattn.runs import RunDirectory
from normattn.training import TrainingConfig
from normattn.training.causal import KIND


def evaluate_run(
    run: Path,
    *,
    methods: Sequence[str],
    protocols: Sequence[str] | None,
    multiples: Sequence[int] | None,
    lengths: Sequence[int] | None,
    max_windows: int,
    max_tokens: int,
    seed: int,
    threads: int,
) -> None:
    """Evaluate the run in the directory `run` and print what was measured.

    Raises `InputError` for a directory that holds no finished run, an unknown protocol or method,
    and lengths that are no multiples of the training length.
    """
    stored = RunDirectory.existing(run, KIND)
    config = TrainingConfig.parse(stored.config, str(run / "config.json"))
    fields = {
        "protocols": [_protocol(name) for name in protocols or PROTOCOLS],
        "multiples": _multiples(multiples, lengths, config.model.train_length),
        "max_windows": max_windows,
        "max_tokens": max_tokens,
        "seed": seed,
    }
    settings = validated(EvaluationSettings, fields, "evaluation settings")
    for method in methods:
        config.model.score.with_method(method).resolve(
            train_length=config.model.train_length, factor=settings.factor
        )
    torch.set_num_threads(threads)
    total = count_evaluations(settings) * len(methods)
    with Console(file=sys.stderr).status("evaluating") as status:
        records = evaluate_trained(
            run,
            config,
            prepare_tokens(config.data),
            methods=methods,
            settings=settings,
            name=run.resolve().name,
            on_done=lambda done: status.update(f"evaluating: {done} of {total}"),
        )
    _show(records)


def _protocol(name: str) -> str:
    plain = name.replace("-", "_")
    if plain in PROTOCOLS:
        return plain
    near = get_close_matches(plain, PROTOCOLS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0].replace('_', '-')}? " if near else ""
    known = ", ".join(each.replace("_", "-") for each in PROTOCOLS)
    raise InputError(f"no protocol is called {name!r}: {hint}there are {known}")


def _multiples(
    multiples: Sequence[int] | None, lengths: Sequence[int] | None, train_length: int
) -> list[int]:
    if multiples is not None and lengths is not None:
        raise InputError("--multiples and --lengths say the same thing twice; give one of them")
    if lengths is None:
        return list(multiples or EvaluationSettings().multiples)
    for length in lengths:
        if length % train_length:
            raise InputError(
                f"--lengths takes multiples of the run's training length {train_length}, "
                f"got {length}"
            )
    return [length // train_length for length in lengths]


def _show(records: Sequence[Record]) -> None:
    """A table of accuracies and losses; intervals come with `normattn report`."""
    table = Table("score", "protocol", "length", "tokens", "accuracy, %", "loss, nats")
    for record in records:
        tokens = record.counts("tokens").sum()
        table.add_row(
            record.name,
            record.protocol,
            str(record.length),
            f"{tokens:,.0f}",
            f"{100 * record.counts('correct').sum() / tokens:.2f}",
            f"{record.counts('loss').sum() / tokens:.4f}",
        )
    Console(highlight=False).print(table)

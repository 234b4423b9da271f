"""A report of single runs: a row for each label, compared on the text windows that they share.

Runs of one label are averaged as its seeds, so they must be trained alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl

from normattn.errors import InputError
from normattn.lab.runs import RunDirectory, read_status
from normattn.lab.stats import concat, read_measurements
from normattn.lab.stats.arrays import describe_left_out, keep_common_data
from normattn.lab.stats.measurements import FACTOR, Factor, diverged
from normattn.lab.studies.language import standalone_store
from normattn.lab.studies.reading import KIND, SEPARATE_TABLES
from normattn.lab.sweep.collect import history, training_identity
from normattn.lab.training import TrainingConfig
from normattn.lab.training.config import CHANGEABLE
from normattn.settings import first_difference
from normattn.terminal import warn

_ALIKE = CHANGEABLE | {
    *("seed", "device", "accumulate", "compile", "kernels", "log_every", "keep", "inspect_every"),
    # The weights decide where a continued run starts; the vocabulary is that of the data.
    *("continued.start", "model.vocab_size"),
}
"""Settings in which runs of one row may differ: seeds, how a step is computed, what is logged."""
RUN = "run"
"""The column with the run of each measurement, while runs are compared."""


def split_label(text: str) -> tuple[str | None, Path]:
    """(label, folder) of `LABEL=RUN`, whose label may hold an =, or (None, folder)."""
    label, equals, folder = text.rpartition("=")
    if not equals or Path(text).exists():
        return None, Path(text)
    if not label.strip() or not folder.strip():
        raise InputError(f"{text!r} has an empty label or run; expected LABEL=RUN or RUN")
    return label.strip(), Path(folder)


def runs_below(folder: Path) -> list[Path]:
    """Every directory of a run at or below a folder, in a fixed order."""
    return sorted(path.parent.resolve() for path in folder.rglob("status.json"))


def measured_of_runs(folders: Sequence[tuple[str | None, Path]]) -> pl.DataFrame:
    """The measurements of every run at or below these folders, with loss curves and divergences.

    Measurements on text windows that most runs do not share are left out, with a warning. Raises
    `InputError` for runs of one row that were trained differently or twice.
    """
    runs = dict.fromkeys((run, label) for label, folder in folders for run in runs_below(folder))
    measured = concat(_labelled(run, label) for run, label in runs)
    if not _evaluated(measured).height and not any(measured["statistic"] == "diverged"):
        names = ", ".join(str(folder) for _, folder in folders)
        raise InputError(
            f"nothing was measured in {names}: no run there was evaluated; use normattn evaluate "
            "first"
        )
    _refuse_other_trainings(measured)
    _refuse_mixed(measured)
    common = keep_common_data(measured)
    others = _evaluated(measured).join(_evaluated(common), on=RUN, how="anti")
    if others.height:
        raise InputError(
            f"{others[RUN][0]} was evaluated on other text windows than most of the runs: evaluate "
            "it with the same corpus, lengths and windows, or make a report of it alone"
        )
    for sentence in describe_left_out(measured, common):
        warn(f"normattn: {sentence}")
    return common.drop(RUN).with_columns(pl.lit(KIND).alias("study"))


def _evaluated(measured: pl.DataFrame) -> pl.DataFrame:
    return measured.filter(pl.col("protocol") != "training", pl.col("statistic") != "diverged")


def _labelled(run: Path, label: str | None) -> pl.DataFrame:
    """The measurements of a run under its label, if it has one, with those of its training."""
    # Of a study's run only standalone evaluations: the study's own records have other rows.
    standalone = standalone_store(run)
    measured = standalone.frame() if len(standalone) else read_measurements(run)
    step = f"{FACTOR}step"
    if step in measured:  # of several measured steps only the last
        measured = measured.filter(pl.col(step) == pl.col(step).max())
    factors: dict[str, Factor] = {
        name.removeprefix(FACTOR): measured[name][0]
        for name in measured.columns
        if name.startswith(FACTOR) and measured[name].n_unique() == 1
    }
    frames, config = [measured], _language_model(run)
    if config is not None:
        score, status = config.model.score, read_status(run)
        training = training_identity(score.variant_name, config.seed, factors)
        frames.append(history(run, training))
        if status is not None and status.state == "diverged":
            ended = replace(training, score=str(score), split="test")
            frames.append(diverged(ended, status.step, status.where))
    frame = concat(frames).with_columns(pl.lit(str(run)).alias(RUN))
    return frame if label is None else frame.with_columns(row=pl.lit(label))


def _language_model(run: Path) -> TrainingConfig | None:
    """The training settings of a language model's run; None for another kind of run."""
    stored = RunDirectory.existing(run).config
    if "model" not in stored or "score" not in stored["model"]:
        return None
    return TrainingConfig.parse(stored, str(run / "config.json"))


def _first_conflict(
    frame: pl.DataFrame, keys: Sequence[str], column: str
) -> tuple[tuple[Any, ...], tuple[Any, Any]] | None:
    """The first keys, ascending, whose rows differ in a column, and two of its values."""
    values = frame.group_by(keys).agg(pl.col(column).unique().sort().head(2))
    several = values.filter(pl.col(column).list.len() > 1).sort(keys)
    if not several.height:
        return None
    *key, (first, second) = several.row(0)
    return tuple(key), (first, second)


def _refuse_other_trainings(measured: pl.DataFrame) -> None:
    """Raise `InputError` where runs of one row differ in a setting, or are the same training."""

    def settings(run: str) -> dict[str, Any]:
        config = _language_model(Path(run))
        stored: dict[str, Any] = RunDirectory.existing(Path(run)).config
        return dict(sorted((stored if config is None else config.model_dump(mode="json")).items()))

    rows = measured.group_by("row", maintain_order=True)
    for row, (first, *others) in rows.agg(pl.col(RUN).unique(maintain_order=True)).rows():
        for run in others:
            different = first_difference(settings(first), settings(run), _ALIKE)
            if different is not None:
                name, value, other_value = different
                raise InputError(
                    f"{first} and {run} would both be the row {row}, but {name} is {value} in the "
                    f"first and {other_value} in the second: label them, as in LABEL=RUN"
                )
    repeated = _first_conflict(_evaluated(measured), ["row", "seed"], RUN)
    if repeated is not None:
        (row, seed), (first, second) = repeated
        raise InputError(
            f"{first} and {second} both hold {row} seed {seed}: give each training once, or label "
            "them, as in LABEL=RUN"
        )


def _refuse_mixed(measured: pl.DataFrame) -> None:
    """Raise `InputError` where one row would hold evaluations that cannot be compared.

    They have different scores, or other last segments through other lengths or windows.
    """
    separate = pl.col("protocol").is_in(SEPARATE_TABLES)
    table = pl.when(separate).then("protocol").otherwise(pl.lit(""))
    rows = _evaluated(measured).with_columns(table.alias("table"))
    last = measured.filter(protocol="last_segment", statistic="loss")
    keys = ["row", "method", "seed"]
    scored = last.group_by(*keys, "length", "unit").agg(pl.col("of").sum())
    scores = _first_conflict(rows, ["row", "method", "table"], "score")
    mixed = (
        scores
        or _first_conflict(last, [*keys, "length"], "data")
        or _first_conflict(scored, [*keys, "unit"], "of")
    )
    if mixed is not None:
        (row, method, *_), (first, second) = mixed
        how = f"as {first} and as {second}" if scores else "with other last segments"
        raise InputError(
            f"{f'{row} with {method}' if method else row} was evaluated {how}, and a report has "
            "one row for it: delete RUN/evaluations and evaluate all runs with the same lengths, "
            "or label them, as in LABEL=RUN"
        )

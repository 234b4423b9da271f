"""Single runs in one report: a row for each label, compared on the text windows that they share.

Runs of one label are its seeds, over which a report takes the mean. So they must be trained alike;
the user names runs that were not, as in `normattn report wide=runs/a narrow=runs/b`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from normattn.errors import InputError
from normattn.lab.runs import RunDirectory, read_status
from normattn.lab.stats import collected, joined, measurements
from normattn.lab.stats.arrays import left_out, on_common_sets
from normattn.lab.stats.measurements import FACTOR, Factor, Identity, diverged
from normattn.lab.studies.language import asked_alone
from normattn.lab.studies.reading import KIND, OWN_TABLES
from normattn.lab.sweep.collect import Corpora, history
from normattn.lab.training import TrainingConfig
from normattn.lab.training.config import CHANGEABLE
from normattn.lab.training.init_from import CORPUS_FILE
from normattn.settings import first_difference
from normattn.terminal import warn

_ALIKE = CHANGEABLE | {
    *("seed", "device", "accumulate", "compile", "kernels", "log_every", "keep", "inspect_every"),
    # The weights decide where a continued run starts; the vocabulary is that of the data.
    *("continued.start", "model.vocab_size"),
}
"""Settings in which runs of one row may differ: seeds, how a step is computed, what is logged."""


@dataclass(frozen=True)
class LabelledRun:
    """A run and what was measured of it, under the rows that it is part of."""

    path: Path
    measured: pl.DataFrame

    @property
    def read(self) -> pl.DataFrame:
        """What was evaluated, without the training."""
        return _evaluated(self.measured)


def split_label(text: str) -> tuple[str | None, Path]:
    """(label, folder) of `LABEL=RUN`, or (None, folder).

    Labels and folders may have an = of their own: what is before the first folder is the label.
    """
    if "=" not in text or Path(text).exists():
        return None, Path(text)
    places = [n for n, letter in enumerate(text) if letter == "="]
    at = next((n for n in places if Path(text[n + 1 :]).is_dir()), places[0])
    label, place = text[:at].strip(), text[at + 1 :]
    if not label:
        raise InputError(f"{text!r} begins with an empty label; expected LABEL=RUN or RUN")
    return label, Path(place)


def runs_below(folder: Path) -> list[Path]:
    """Every directory of a run at or below a folder, in a fixed order."""
    return sorted(path.parent.resolve() for path in folder.rglob("status.json"))


def measured_of_runs(places: Sequence[tuple[str | None, Path]]) -> pl.DataFrame:
    """What was measured in every run at or below these folders, with loss curves and divergences.

    Warns on stderr of measurements on other text windows than most runs share, which are left out.
    Raises `InputError` where nothing was measured, where runs of one row were trained differently
    or twice, and where what was measured of a run cannot be one row.
    """
    runs = [_labelled(run, label) for label, folder in places for run in runs_below(folder)]
    _refuse_other_trainings(runs)
    for run in runs:
        _refuse_other_windows(run)
    whole = joined([run.measured for run in runs]) if runs else measurements.empty()
    _refuse_other_scores(_evaluated(whole))
    if not _evaluated(whole).height and not any(whole["statistic"] == "diverged"):
        named = ", ".join(str(folder) for _, folder in places)
        raise InputError(
            f"nothing was measured in {named}: no run there was evaluated; use normattn evaluate "
            "first"
        )
    kept = on_common_sets(whole)
    for run in runs:
        on = ["row", "seed", "data", "protocol"]
        if run.read.height and not run.read.join(_evaluated(kept), on=on, how="semi").height:
            raise InputError(
                f"{run.path} was evaluated on other text windows than most of the runs: evaluate "
                "it with the same corpus, lengths and windows, or make a report of it alone"
            )
    for sentence in left_out(whole, kept):
        warn(f"normattn: {sentence}")
    return kept.with_columns(pl.lit(KIND).alias("study"))


def _evaluated(measured: pl.DataFrame) -> pl.DataFrame:
    return measured.filter(pl.col("protocol") != "training", pl.col("statistic") != "diverged")


def _labelled(run: Path, label: str | None) -> LabelledRun:
    # Of a study's run what was evaluated by itself; the study's own records have other rows.
    alone = asked_alone(run)
    measured = alone.frame() if len(alone) else collected(run)
    step = f"{FACTOR}step"
    if step in measured:  # of a run that was measured at several steps the last: its model
        measured = measured.filter(pl.col(step) == pl.col(step).max())
    factors = {
        name.removeprefix(FACTOR): measured[name][0]
        for name in measured.columns
        if name.startswith(FACTOR) and measured[name].n_unique() == 1
    }
    whole = joined([measured, *_training(run, factors)])
    return LabelledRun(run, whole.with_columns(row=pl.lit(label)) if label is not None else whole)


def _training(run: Path, factors: Mapping[str, Factor]) -> list[pl.DataFrame]:
    """The loss curve of a run of a language model, and where it diverged, if it did."""
    config = _language_model(run)
    if config is None:
        return []
    name = config.model.score.variant_name
    frames = [history(run, name, config.seed, factors)]
    status = read_status(run)
    if status is not None and status.state == "diverged":
        score = str(config.model.score)
        whose = Identity("", name, score, config.seed, "training", factors=factors)
        frames.append(diverged(whose, status.step, status.where))
    return frames


def _language_model(run: Path) -> TrainingConfig | None:
    """How the run of a language model was trained; None for another one."""
    stored = RunDirectory.existing(run).config
    if "model" not in stored or "score" not in stored["model"]:
        return None
    return TrainingConfig.parse(stored, str(run / "config.json"))


def _refuse_other_trainings(runs: Sequence[LabelledRun]) -> None:
    """Raise `InputError` where runs of one row differ in a setting, or are the same training."""
    first: dict[str, Path] = {}
    seen: dict[tuple[str, int], Path] = {}
    for run in runs:
        for row in run.measured["row"].unique().to_list():
            before = first.setdefault(row, run.path)
            if before != run.path and (different := _difference(before, run.path)) is not None:
                name, here, there = different
                raise InputError(
                    f"{before} and {run.path} would both be the row {row}, but {name} is {here} in "
                    f"the first and {there} in the second: name them, as in LABEL=RUN"
                )
            for seed in run.read.filter(row=row)["seed"].unique().to_list():
                same = seen.setdefault((row, seed), run.path)
                if same != run.path:
                    raise InputError(
                        f"{same} and {run.path} both hold {row} seed {seed}: give each training "
                        "once, or name them, as in LABEL=RUN"
                    )


def _difference(one: Path, other: Path) -> tuple[str, str, str] | None:
    """The first setting in which two trainings differ, with its two values."""
    files = [run / CORPUS_FILE for run in (one, other)]
    texts = [Corpora.read(file).fingerprints for file in files if file.is_file()]
    # Two addresses may name one text, which its tokens tell.
    same_text = len(texts) == 2 and texts[0] == texts[1] != frozenset()
    free = _ALIKE | ({"data.corpus"} if same_text else frozenset())
    return first_difference(_settings(one), _settings(other), free)


def _settings(run: Path) -> dict[str, Any]:
    """The training settings of a run, whole where it is that of a language model."""
    config = _language_model(run)
    stored: dict[str, Any] = RunDirectory.existing(run).config
    return dict(sorted((stored if config is None else config.model_dump(mode="json")).items()))


def _refuse_other_windows(run: LabelledRun) -> None:
    """Raise `InputError` where the last segment after one length is not that after another.

    Evaluations with other longest contexts, or other numbers of windows, score other tokens: their
    difference is not what a context adds.
    """
    rows = run.measured.filter(protocol="last_segment", statistic="loss")
    for (row, _), own in rows.group_by("row", "method", maintain_order=True):
        sets = own.group_by("seed", "length").agg(pl.col("data").n_unique())
        scored = own.group_by("seed", "length", "unit").agg(pl.col("of").sum())
        tokens, units = scored.select("seed", "unit", "of"), scored.select("seed", "unit")
        if sets["data"].max() != 1 or tokens.unique().height != units.unique().height:
            raise InputError(
                f"{run.path} was evaluated several times, and the last segments of {row} are not "
                "the same tokens at each length: remove its records and evaluate it once more, "
                "with all lengths"
            )


def _refuse_other_scores(measured: pl.DataFrame) -> None:
    """Raise `InputError` where one row of a table would hold two scores, as of YaRN by 4 and 8."""
    table = pl.when(pl.col("protocol").is_in(OWN_TABLES)).then("protocol").otherwise(pl.lit(""))
    scores = measured.with_columns(table.alias("table")).group_by("row", "method", "table")
    several = scores.agg(pl.col("score").unique().sort()).filter(pl.col("score").list.len() > 1)
    for row, method, _, names in several.sort("row", "method", "table").rows():
        shown = f"{row} with {method}" if method else row
        raise InputError(
            f"{shown} was evaluated as {names[0]} and as {names[1]}, and a report has one row for "
            "it: evaluate all runs with the same longest length, or name them, as in LABEL=RUN"
        )

"""Single runs on one page: a row for each label, compared on the text windows that they share.

Runs of one label are its seeds, over which a page takes the mean. So they must be trained alike;
runs that were not are told apart by the user, as in `normattn report wide=runs/a narrow=runs/b`.
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
from normattn.lab.stats.measurements import FACTOR
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
_CORPUS = "data.corpus"


@dataclass(frozen=True)
class LabelledRun:
    """A run, the name of its row (None: that of its score), and what was measured of it."""

    path: Path
    label: str | None
    measured: pl.DataFrame

    @property
    def rows(self) -> set[str]:
        """The rows that it is part of."""
        return set(self.measured["row"].unique().to_list())


def split_label(text: str) -> tuple[str | None, Path]:
    """(label, folder) of `LABEL=RUN`, or (None, folder).

    Labels and folders may have an = of their own: what is before the first folder is the label.
    """
    if "=" not in text or Path(text).exists():
        return None, Path(text)
    places = [n for n, letter in enumerate(text) if letter == "="]
    at = next((n for n in places if Path(text[n + 1 :]).is_dir()), places[0])
    label, place = text[:at], text[at + 1 :]
    if not label.strip():
        raise InputError(f"{text!r} begins with an empty label; expected LABEL=RUN or RUN")
    return label.strip(), Path(place)


def of_runs(places: Sequence[tuple[str | None, Path]]) -> pl.DataFrame:
    """What was measured in every run at or below these folders, with loss curves and divergences.

    Warns on stderr of measurements on other text windows than most runs share, which are left out.
    Raises `InputError` where nothing was measured, where runs of one row were trained differently
    or twice, and where what was measured of a run cannot stand in one row.
    """
    runs = [_labelled(run, label) for label, folder in places for run in runs_below(folder)]
    _refuse_other_trainings(runs)
    for run in runs:
        _refuse_other_windows(run)
    whole = joined([run.measured for run in runs]) if runs else measurements.empty()
    _refuse_other_scores(_read(whole))
    if not _read(whole).height and not any(whole["statistic"] == "diverged"):
        named = ", ".join(str(folder) for _, folder in places)
        raise InputError(
            f"nothing was measured in {named}: no run there was evaluated; use normattn evaluate "
            "first"
        )
    kept = on_common_sets(whole)
    for run in runs:
        if (
            _read(run.measured).height
            and not run.measured.join(
                _read(kept), on=["row", "seed", "data", "protocol"], how="semi"
            ).height
        ):
            raise InputError(
                f"{run.path} was evaluated on other text windows than most of the runs: evaluate "
                "it with the same corpus, lengths and windows, or make a page of it alone"
            )
    for sentence in left_out(whole, kept):
        warn(f"normattn: {sentence}")
    return kept.with_columns(pl.lit(KIND).alias("study"))


def runs_below(folder: Path) -> list[Path]:
    """Every directory of a run at or below a folder, in a fixed order."""
    return sorted(path.parent.resolve() for path in folder.rglob("status.json"))


def _labelled(run: Path, label: str | None) -> LabelledRun:
    # Of a study's run what was asked of it alone; the study's own has rows of its own there.
    alone = asked_alone(run)
    measured = _at_the_end(alone.frame() if len(alone) else collected(run))
    whole = joined([measured, *_training(run, _factors(measured))])
    if label is not None:
        whole = whole.with_columns(pl.lit(label).alias("row"))
    return LabelledRun(run, label, whole)


def _read(measured: pl.DataFrame) -> pl.DataFrame:
    """What was read of texts, without the trainings."""
    return measured.filter(pl.col("protocol") != "training", pl.col("statistic") != "diverged")


def _at_the_end(measured: pl.DataFrame) -> pl.DataFrame:
    """Of a run that was measured at several steps its last: the model that it holds."""
    step = f"{FACTOR}step"
    return measured.filter(pl.col(step) == pl.col(step).max()) if step in measured else measured


def _factors(measured: pl.DataFrame) -> dict[str, measurements.Factor]:
    """What one run's measurements have in common, which its training has as well."""
    names = [name for name in measured.columns if name.startswith(FACTOR)]
    values = {name.removeprefix(FACTOR): measured[name].unique().to_list() for name in names}
    return {name: shared[0] for name, shared in values.items() if len(shared) == 1}


def language_model(run: Path) -> TrainingConfig | None:
    """How the run of a language model was trained; None for another one."""
    stored = RunDirectory.existing(run).config
    if "model" not in stored or "score" not in stored["model"]:
        return None
    return TrainingConfig.parse(stored, str(run / "config.json"))


def _training(run: Path, factors: Mapping[str, measurements.Factor]) -> list[pl.DataFrame]:
    """The loss curve of a run of a language model, and where it diverged, if it did."""
    config = language_model(run)
    if config is None:
        return []
    name = config.model.score.variant_name
    frames = [history(run, name, config.seed, factors)]
    status = read_status(run)
    if status is not None and status.state == "diverged":
        whose = measurements.Identity(
            "", name, str(config.model.score), config.seed, "training", factors=factors
        )
        edges = [float(status.step)]
        rows = measurements.sums(
            "diverged", [status.where], [[1.0]], [[1.0]], axis="step", edges=edges
        )
        frames.append(measurements.identified(whose, [rows]))
    return frames


def _refuse_other_trainings(runs: Sequence[LabelledRun]) -> None:
    """Raise `InputError` where runs of one row differ in a setting, or are the same training."""
    first: dict[str, LabelledRun] = {}
    seen: dict[tuple[str, int], LabelledRun] = {}
    for run in runs:
        for row in run.rows:
            before = first.setdefault(row, run)
            if before is not run and (different := _difference(before.path, run.path)) is not None:
                name, here, there = different
                raise InputError(
                    f"{before.path} and {run.path} would both be the row {row}, but {name} is "
                    f"{here} in the first and {there} in the second: name them, as in LABEL=RUN"
                )
            for seed in _read(run.measured).filter(row=row)["seed"].unique().to_list():
                same = seen.setdefault((row, seed), run)
                if same is not run:
                    raise InputError(
                        f"{same.path} and {run.path} both hold {row} seed {seed}: give each "
                        "training once, or name them, as in LABEL=RUN"
                    )


def _difference(one: Path, other: Path) -> tuple[str, str, str] | None:
    """The first setting in which two trainings differ, with its two values."""
    texts = [
        Corpora.read(run / CORPUS_FILE).fingerprints
        for run in (one, other)
        if (run / CORPUS_FILE).is_file()
    ]
    # Two addresses may name one text, which its tokens tell.
    same_text = len(texts) == 2 and texts[0] == texts[1] != frozenset()
    free = _ALIKE | ({_CORPUS} if same_text else frozenset())
    return first_difference(_settings(one), _settings(other), free)


def _settings(run: Path) -> dict[str, Any]:
    """The training settings of a run, whole where it is that of a language model."""
    config = language_model(run)
    stored: dict[str, Any] = RunDirectory.existing(run).config
    stored = stored if config is None else config.model_dump(mode="json")
    return dict(sorted(stored.items()))


def _refuse_other_windows(run: LabelledRun) -> None:
    """Raise `InputError` where the last segment after one length is not that after another.

    Evaluations with other longest contexts, or other numbers of windows, score other tokens: their
    difference is not what a context adds.
    """
    rows = run.measured.filter(protocol="last_segment", statistic="loss")
    for (row, _), own in rows.group_by("row", "method", maintain_order=True):
        sets = own.group_by("seed", "length").agg(pl.col("data").n_unique())
        counted = own.group_by("seed", "length", "unit").agg(pl.col("of").sum())
        texts = counted.select("seed", "unit", "of").unique().height
        if sets["data"].max() != 1 or texts != counted.select("seed", "unit").unique().height:
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
            f"{shown} was evaluated as {names[0]} and as {names[1]}, and a page has one row for "
            "it: evaluate all runs with the same longest length, or name them, as in LABEL=RUN"
        )

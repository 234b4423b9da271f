"""Names of runs that stand on one page: what they vary in, and what they were trained with.

Runs of one row are its seeds, over which a page takes the mean; so runs that were trained
differently must not share a row. What tells them apart is put into the row's name:
"Baseline (continued ABF)", "Baseline (model.dim 16, steps 3)".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from normattn.errors import InputError
from normattn.lab.runs import RunDirectory
from normattn.lab.stats.measurements import Factor
from normattn.lab.sweep.corpora import Corpora
from normattn.lab.training import TrainingConfig
from normattn.lab.training.corpus_record import CORPUS_FILE
from normattn.lab.training.loop_config import CHANGEABLE

MOST = 4
"""Settings that a row's name may hold."""

_ALIKE = CHANGEABLE | {
    "seed",
    # How and where a step is computed changes it by rounding alone.
    *("device", "accumulate", "compile", "kernels"),
    # What is written down on the way changes nothing.
    *("log_every", "keep", "inspect_every"),
    # The weights decide where a continued run starts; the vocabulary is that of the data.
    *("continued.start", "model.vocab_size"),
}
"""Settings in which runs of one row may differ."""
_CORPUS = "data.corpus"


@dataclass(frozen=True)
class GatheredRun:
    """A run, what was measured of it, the factors and the training settings that are its own.

    `settings` are by dotted name, as text, without those of no value; `text` are the fingerprints
    of what it was trained on, if they are known.
    """

    path: Path
    frame: pl.DataFrame
    factors: Mapping[str, Factor]
    settings: Mapping[str, str] = field(default_factory=dict)
    text: frozenset[str] = frozenset()

    @classmethod
    def of(cls, path: Path, measured: pl.DataFrame, factors: Mapping[str, Factor]) -> GatheredRun:
        """The run in `path`, of which `measured` is known."""
        corpus = path / CORPUS_FILE
        text = Corpora.read(corpus).fingerprints if corpus.is_file() else frozenset[str]()
        return cls(path, measured, factors, _settings(path), text)


def language_model(run: Path) -> TrainingConfig | None:
    """How the run of a language model was trained; None for another one."""
    stored = RunDirectory.existing(run).config
    if "model" not in stored or "score" not in stored["model"]:
        return None
    return TrainingConfig.parse(stored, str(run / "config.json"))


def told_apart(runs: Sequence[GatheredRun]) -> list[pl.DataFrame]:
    """The rows of each run, with what tells it from others in their names.

    Raises `InputError` where runs of one row differ in more settings than a name can hold.
    """
    shared = _differing([run.factors for run in runs])
    said = [_said(run.factors, [n for n in shared if n in run.factors]) for run in runs]
    for group in _of_one_name(runs, said):
        lacking = _varied([runs[index].factors for index in group])
        for index in group:
            said[index] += _said(runs[index].factors, lacking)
    for group in _of_one_name(runs, said):
        together = [runs[index] for index in group]
        names = _trained_otherwise(together)
        for index in group:
            said[index] += _said(runs[index].settings, names)
    return [_named(run.frame, words) for run, words in zip(runs, said, strict=True)]


def _named(measured: pl.DataFrame, said: Sequence[str]) -> pl.DataFrame:
    """The rows with these words in their names."""
    return measured.with_columns(pl.col("row") + (f" ({', '.join(said)})" if said else ""))


def _differing(runs: Sequence[Mapping[str, Factor]]) -> list[str]:
    """The factors in which runs differ that have them."""
    names = sorted({name for run in runs for name in run})
    return [name for name in names if len({run[name] for run in runs if name in run}) > 1]


def _varied(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of which not every run has the same value, or none."""
    names = dict.fromkeys(name for run in runs for name in run)
    return [name for name in names if len({str(run.get(name)) for run in runs}) > 1]


def _said(values: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """ "continued ABF" of what there is."""
    return [f"{name.replace('_', ' ')} {values[name]}" for name in names if name in values]


def _of_one_name(runs: Sequence[GatheredRun], said: Sequence[Sequence[str]]) -> list[list[int]]:
    """The places of the runs whose rows have one name."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, (run, words) in enumerate(zip(runs, said, strict=True)):
        rows = sorted(run.frame["row"].unique().to_list())
        groups.setdefault((*rows, *words), []).append(index)
    return list(groups.values())


def _trained_otherwise(runs: Sequence[GatheredRun]) -> list[str]:
    """The training settings in which runs of one row differ."""
    names = _varied([run.settings for run in runs])
    # Of another optimiser or schedule its name says enough, not what it alone has.
    chosen = {name.removesuffix("name") for name in names if name.endswith(".name")}
    everywhere = set.intersection(*(set(run.settings) for run in runs))
    names = [n for n in names if n in everywhere or n[: n.rfind(".") + 1] not in chosen]
    if len({run.text for run in runs}) == 1 and runs[0].text:
        # Two addresses may name one text.
        names = [name for name in names if name != _CORPUS]
    if len(names) > MOST:
        _refuse(runs, names)
    return names


def _refuse(runs: Sequence[GatheredRun], names: Sequence[str]) -> None:
    first, values = names[0], [run.settings.get(names[0], "none") for run in runs]
    other = next(index for index, value in enumerate(values) if value != values[0])
    row = runs[0].frame["row"][0]
    raise InputError(
        f"{runs[0].path} and {runs[other].path} both hold {row}, trained with {len(names)} other "
        f"settings ({first} is {values[0]} in the first and {values[other]} in the second), and "
        f"the name of a row tells at most {MOST}: make a page of each"
    )


def _settings(run: Path) -> dict[str, str]:
    """The training settings that decide what is learned, by dotted name."""
    config = language_model(run)
    if config is None:
        return _flat(RunDirectory.existing(run).config)
    # The training length is a setting beside the score, and is no part of its name.
    return {
        **_flat(config.model_dump(mode="json")),
        "model.score": config.model.score.variant_name,
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name in _ALIKE or value is None:
            continue
        flat |= _flat(value, f"{name}.") if isinstance(value, Mapping) else {name: str(value)}
    return flat

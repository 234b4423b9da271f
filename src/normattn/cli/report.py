"""`normattn report`: of a folder with measurements, of a sweep, of several, or of single runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from normattn.cli import options
from normattn.cli.report_runs import first_conflict, measured_of_runs, runs_below, split_label
from normattn.errors import InputError, NormattnError
from normattn.io import read_object, write_json
from normattn.lab.report.terminal import say
from normattn.lab.runs.directory import FORMAT
from normattn.lab.stats import joined, measurements
from normattn.lab.stats.measurements import FACTOR
from normattn.lab.studies import OF_COMMANDS, errors_in, extend, find, find_typed
from normattn.lab.studies.base import Study
from normattn.lab.studies.extend import KIND as EXTEND
from normattn.lab.studies.reading import KIND as READING
from normattn.lab.sweep.collect import Corpora
from normattn.lab.sweep.config import CHANGEABLE
from normattn.lab.sweep.paths import RunPaths
from normattn.lab.sweep.runner import study_named
from normattn.settings import first_difference
from normattn.terminal import warn

TASK, FOLDER = f"{FACTOR}task", "folder"
ADDRESS = "training.data.corpus"
"""Two addresses may name one text: what was trained on is then told by its tokens."""


@dataclass(frozen=True)
class Part:
    """What a folder of a study holds: whose it is, its settings and its measurements."""

    folder: Path
    study: Study
    config: Mapping[str, Any]
    measured: pl.DataFrame
    corpora: Corpora


def report_folders(asked: options.Report) -> None:
    """Write the report of folders, each RUN or LABEL=RUN, into `out` (else into the first).

    A sweep's directory is collected again; a folder without runs that holds measurements.parquet
    is recomputed from it alone, by the study that the measurements name, or by `asked.study`.
    Several folders of one study are joined, those of `extend` compared; of runs each label is a
    row. Raises `InputError` where there is nothing to report.
    """
    labelled = [split_label(text) for text in asked.runs]
    places = [folder for _, folder in labelled]
    for folder in places:
        if not str(folder).strip() or not folder.is_dir():
            raise InputError(f"{str(folder)!r} is no directory of runs or results")
    out = asked.out or places[0]
    by_label = any(label is not None for label, _ in labelled)
    whole = None if by_label else _of_one_study(places, out, asked.study)
    if whole is None:
        study, measured, config = find_typed(asked.study or READING), measured_of_runs(labelled), {}
    else:
        study, measured, config = whole.study, whole.measured, dict(whole.config)
    with errors_in(study), _unusable(places, study):
        written = study.report(measured, out, config)
    for folder in places:
        _warn_of_unfinished(folder)
    say(out, written)


def _of_one_study(places: Sequence[Path], out: Path, named: str | None) -> Part | None:
    """What the folders of one study hold together; None for folders of runs."""
    several = len(places) > 1
    if several and all(_configuration(folder)[1] == EXTEND for folder in places):
        return _gallery(places, out)
    parts = [_part(folder, named) for folder in places]
    known = [part for part in parts if part is not None]
    if len(known) == len(places) and len({part.study.name for part in known}) == 1:
        whole = _joined(known, out) if several else known[0]
        _keep_settings(whole, out)
        return whole
    kinds = ["runs" if part is None else f"the study {part.study.name}" for part in parts]
    for part in known:
        if not runs_below(part.folder):
            own = f"the study {part.study.name}"
            other = next(n for n, kind in enumerate(kinds) if kind != own)
            raise InputError(
                f"{part.folder} holds {own} and {places[other]} {kinds[other]}, which have no "
                "table in common; one report is of folders of one study, or of runs"
            )
    return None


@contextmanager
def _unusable(places: Sequence[Path], study: Study) -> Iterator[None]:
    """Raise `InputError` for measurements that no report of the library can be made of.

    Files whose digests are right can hold labels and numbers that no study wrote, which then are
    not found, or no numbers. What else fails is a bug, and stays one.
    """
    try:
        yield
    except NormattnError:
        raise
    except (LookupError, ValueError, ArithmeticError, pl.exceptions.PolarsError) as error:
        if study.source is not None:
            raise
        raise InputError(
            f"{', '.join(map(str, places))} does not hold the measurements that a report of "
            f"{study.name} is made of: {type(error).__name__}: {error}"
        ) from error


def _part(folder: Path, named: str | None) -> Part | None:
    """What the folder of a study holds; None for one of runs."""
    config, kind = _configuration(folder)
    file = folder / measurements.FILE
    if kind is not None and (folder / "jobs").is_dir():
        cells = RunPaths.below(folder)
        study = find_typed(named) if named else find(kind)
        if cells and not named:
            study = _registered(study_named(cells[0].settings), cells[0].settings)
        with errors_in(study):
            _refuse_lost(study, folder)
            measured = study.measurements(folder)
    elif kind in OF_COMMANDS and not file.is_file():
        raise InputError(
            f"{folder} holds measurements of {kind} without a page: run its command again, which "
            "measures nothing twice"
        )
    # A report of runs lies among them by default: they may have been measured again since.
    elif file.is_file() and (kind in OF_COMMANDS or not runs_below(folder)):
        measured = measurements.read(file)
        names = measured["study"].unique().to_list()
        if not named and len(names) != 1:
            raise InputError(f"{file} holds measurements of {len(names)} studies, expected one")
        study = find_typed(named) if named else _registered(str(names[0]), file)
    else:
        return None
    return Part(folder, study, config, measured, Corpora.below(folder))


def _configuration(folder: Path) -> tuple[Mapping[str, Any], str | None]:
    """The settings and the study of a folder, as its config.json holds them."""
    file = folder / "config.json"
    if not file.is_file():
        if (folder / "jobs").is_dir():
            raise InputError(
                f"{file} is gone, and with it the settings of the study in that folder: restore it"
            )
        return {}, None
    stored = read_object(file)
    config = stored.get("config")
    if not isinstance(config, dict):
        raise InputError(f"{file} is damaged: expected a kind and a config")
    for name, kind in (("preset", str), ("changed", dict), ("asked", list)):
        if not isinstance(config.get(name, kind()), kind):
            raise InputError(f"{file} is damaged: {name} is {config[name]!r:.40} there")
    return config, str(stored.get("kind"))


def _registered(name: str, source: Path) -> Study:
    """The study of the library that a file names; a file never chooses other code."""
    try:
        return find(name)
    except InputError as error:
        raise InputError(f"{source}: {error} (--study FILE.py)") from error


def _refuse_lost(study: Study, folder: Path) -> None:
    """Raise `InputError` where records of a finished run are no longer there."""
    for done in sorted(folder.glob("jobs/*/*/done.json")):
        paths = RunPaths.of_job(done.parent)
        for stage in study.run(read_object(done), str(done)).stages(paths):
            if not stage.is_done():
                raise InputError(
                    f"{paths.run} was finished, but records of its {stage.phase} are missing; the "
                    "study's own command on this folder makes them again"
                )


def _warn_of_unfinished(folder: Path) -> None:
    """Name the runs whose measurements are not complete: a report shows what there is."""
    begun = [at for at in RunPaths.below(folder) if not at.done.exists()]
    names = [f"{at.run.parent.name} {at.run.name}" for at in begun if not at.diverged.exists()]
    if names:
        warn(
            f"normattn: of {folder} not finished, and shown as far as measured: {', '.join(names)}"
        )


# Several folders.


def _gallery(places: Sequence[Path], out: Path) -> Part:
    """Models and texts that `extend` measured; their settings are kept in `out` too."""
    _refuse_own_place(out, places, "one model on one text")
    measured, config = extend.gathered(places), extend.settings(places)
    kind, name = _configuration(out)[1], extend.GALLERY.name
    if kind not in (None, name):
        raise InputError(f"{out / 'config.json'} is that of {kind}: give another --out")
    write_json(out / "config.json", {"format": FORMAT, "kind": name, "config": config})
    return Part(out, extend.GALLERY, config, measured, Corpora())


def _joined(parts: Sequence[Part], out: Path) -> Part:
    """Folders of one study whose runs were trained apart (other seeds, other machines), as one.

    Raises `InputError` where their settings differ, where two hold one run, and where a protocol
    was measured on other documents in each.
    """
    first, study = parts[0], parts[0].study
    _refuse_own_place(out, [part.folder for part in parts], f"some of the cells of {study.name}")
    for part in parts[1:]:
        _refuse_other_settings(first, part)
    measured = joined(
        part.measured.with_columns(pl.lit(str(part.folder)).alias(FOLDER)) for part in parts
    )
    _refuse_shared_runs(measured)
    _refuse_other_documents(measured)
    config = dict(first.config)
    given = [choices for part in parts for choices in part.config.get("asked") or [{}]]
    if any(given):
        config["asked"] = [choices for n, choices in enumerate(given) if choices not in given[:n]]
    corpora = Corpora.joined(part.corpora for part in parts)
    return Part(first.folder, study, config, measured.drop(FOLDER), corpora)


def _refuse_own_place(out: Path, places: Sequence[Path], held: str) -> None:
    if out.resolve() in {folder.resolve() for folder in places}:
        raise InputError(f"{out} holds {held}: give the report of all its own --out")


def _refuse_other_settings(one: Part, other: Part) -> None:
    same_text = one.corpora == other.corpora != Corpora()
    free = frozenset({*CHANGEABLE, *([ADDRESS] if same_text else [])})
    differs = first_difference(dict(one.config), dict(other.config), free)
    if differs is not None:
        name, here, there = differs
        raise InputError(
            f"{one.folder} and {other.folder} cannot be joined: {name} is {here} in the first and "
            f"{there} in the second"
        )


def _refuse_shared_runs(measured: pl.DataFrame) -> None:
    """A training is told by its row, its seed and what else its loss curve was said to vary in."""
    keys, trained = ["row", "seed"], measured.filter(protocol="training")
    if trained[FOLDER].n_unique() == measured[FOLDER].n_unique():
        measured = trained
        keys += sorted(name for name in trained.columns if name.startswith(FACTOR) and name != TASK)
    shared = first_conflict(measured, keys, FOLDER)
    if shared is not None:
        (row, seed, *others), (one, other) = shared
        varied = ", ".join(str(value) for value in others if value not in (None, row))
        raise InputError(
            f"{one} and {other} both hold {row} seed {seed}{f' ({varied})' if varied else ''}; "
            "each run may be in one of them"
        )


def _refuse_other_documents(measured: pl.DataFrame) -> None:
    """Of each protocol and length all folders that hold it must share documents."""
    keys = ["protocol", "length", "split", *({TASK} & set(measured.columns))]
    folders = pl.col(FOLDER).n_unique()
    common = (folders.over(*keys, "data") == folders.over(keys)).any().over(keys)
    apart = measured.filter(~common).sort(keys)
    if apart.height:
        protocol, length = apart.select("protocol", "length").row(0)
        named = apart.filter(protocol=protocol, length=length)[FOLDER].unique().sort().to_list()
        raise InputError(
            f"{' and '.join(named)} were measured on different documents ({protocol} at length "
            f"{length}): prepare the same corpus for all"
        )


def _keep_settings(whole: Part, out: Path) -> None:
    """Keep settings and sources in `out`: it is a folder of the study, and can be joined again."""
    source, settings = whole.folder, out / "config.json"
    if not whole.config or out.resolve() == source.resolve():
        return
    if settings.exists() and _configuration(out)[0] != whole.config:
        raise InputError(f"{settings} holds other settings than {source}: give another --out")
    write_json(settings, {**read_object(source / "config.json"), "config": dict(whole.config)})
    whole.corpora.write(out)

"""`normattn report`: the page of a folder that holds its frame, of a sweep, or of single runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from normattn.cli.joining import joined_cells
from normattn.cli.report_runs import of_runs, runs_below, split_label
from normattn.errors import InputError, NormattnError
from normattn.io import read_object, write_json
from normattn.lab.report.terminal import say
from normattn.lab.runs.directory import FORMAT
from normattn.lab.stats import measurements
from normattn.lab.studies import OF_COMMANDS, errors_in, extend, find, find_typed
from normattn.lab.studies.base import Study
from normattn.lab.studies.extend import KIND as EXTEND
from normattn.lab.studies.reading import KIND as READING
from normattn.lab.sweep.collect import Corpora
from normattn.lab.sweep.config import with_added
from normattn.lab.sweep.paths import RunPaths
from normattn.lab.sweep.runner import study_named
from normattn.terminal import warn


@dataclass(frozen=True)
class Measured:
    """What a folder of a study holds: whose it is, its settings and its measurements."""

    study: Study
    config: Mapping[str, Any]
    frame: pl.DataFrame
    corpora: Corpora = field(default_factory=Corpora)


def report(given: Sequence[str | Path], out: Path | None, named: str | None = None) -> None:
    """Write the page of folders, each PATH or LABEL=PATH, into `out` (else into the first).

    A sweep's directory is collected again; a folder without cells that holds measurements.parquet
    is recomputed from it alone, by the study that the frame names, or the one `named`. Several
    folders of one study are joined, those of `extend` put side by side; of runs each label is a
    row. Raises `InputError` where there is nothing to report.
    """
    labelled = [split_label(str(text)) for text in given]
    places = [folder for _, folder in labelled]
    for folder in places:
        if not str(folder).strip() or not folder.is_dir():
            raise InputError(f"{str(folder)!r} is no directory of runs or results")
    out = out or places[0]
    by_label = any(label is not None for label, _ in labelled)
    whole = None if by_label else _of_one_study(places, out, named)
    if whole is None:
        study = find_typed(named or READING)
        whole = Measured(study, {}, of_runs(labelled))
    with errors_in(whole.study), _unusable(places, whole.study):
        written = whole.study.report(whole.frame, out, whole.config)
    for folder in places:
        _tell_unfinished(folder)
    say(out, written)


def _of_one_study(places: Sequence[Path], out: Path, named: str | None) -> Measured | None:
    """What the folders of one study hold together; None for folders of runs."""
    several = len(places) > 1
    if several and all(_configuration(folder)[1] == EXTEND for folder in places):
        _refuse_own_place(out, places, "one model on one text")
        return _gallery(places, out)
    known = [_measured(folder, named) for folder in places]
    of_studies = [part for part in known if part is not None]
    if len(of_studies) == len(places) and len({part.study.name for part in of_studies}) == 1:
        whole = _joined(places, of_studies, out) if several else of_studies[0]
        _leave_settings(whole, places[0], out)
        return whole
    kinds = ["runs" if part is None else f"the study {part.study.name}" for part in known]
    for folder, part, kind in zip(places, known, kinds, strict=True):
        if part is not None and not runs_below(folder):
            other = next(n for n, name in enumerate(kinds) if name != kind)
            raise InputError(
                f"{folder} holds {kind} and {places[other]} {kinds[other]}, which have no table in "
                "common; one page is made of folders of one study, or of runs"
            )
    return None


@contextmanager
def _unusable(places: Sequence[Path], study: Study) -> Iterator[None]:
    """Raise `InputError` where a library's page cannot be made of what these folders hold.

    A page takes labels, factors and settings for what its study wrote. Files whose digests are
    right can hold others, and no list of checks would name them all.
    """
    try:
        yield
    except (NormattnError, OSError, MemoryError):
        raise
    except Exception as error:
        if study.source is not None:
            raise
        named = ", ".join(map(str, places))
        raise InputError(
            f"{named} does not hold the settings and measurements that a page of {study.name} is "
            f"made of: {type(error).__name__}: {error}"
        ) from error


def _measured(folder: Path, named: str | None) -> Measured | None:
    """What the folder of a study holds; None for one of runs."""
    config, kind = _configuration(folder)
    if kind is not None and (folder / "jobs").is_dir():
        study = find_typed(named) if named else _study_of_cells(folder) or find(kind)
        with errors_in(study):
            _refuse_lost(study, folder)
            measured = study.measurements(folder)
        return Measured(study, config, measured, Corpora.below(folder))
    # A page made of runs lies among them by default: they may have been measured again since.
    if (folder / measurements.FILE).is_file() and (kind in OF_COMMANDS or not runs_below(folder)):
        measured = measurements.read(folder / measurements.FILE)
        study = find_typed(named) if named else _study_of(measured, folder / measurements.FILE)
        return Measured(study, config, measured, Corpora.below(folder))
    return None


def _gallery(places: Sequence[Path], out: Path) -> Measured:
    """Models and texts that `extend` read, whose settings lie in `out` too."""
    measured, config = extend.gathered(places), extend.settings(places)
    kind = _configuration(out)[1]
    if kind not in (None, extend.GALLERY.name):
        raise InputError(f"{out / 'config.json'} is that of {kind}: give another --out")
    write_json(
        out / "config.json", {"format": FORMAT, "kind": extend.GALLERY.name, "config": config}
    )
    return Measured(extend.GALLERY, config, measured)


def _joined(places: Sequence[Path], parts: Sequence[Measured], out: Path) -> Measured:
    """Folders of one study as one."""
    _refuse_own_place(out, places, f"some of the cells of {parts[0].study.name}")
    whole = joined_cells(
        places,
        [part.config for part in parts],
        [part.frame for part in parts],
        [part.corpora for part in parts],
    )
    config = dict(parts[0].config)
    for part in parts[1:]:
        config = with_added(config, part.config)
    asked = [choices for part in parts for choices in part.config.get("asked") or [{}]]
    if any(asked):
        config["asked"] = [choices for n, choices in enumerate(asked) if choices not in asked[:n]]
    corpora = Corpora.joined(part.corpora for part in parts)
    return Measured(parts[0].study, config, whole, corpora)


def _leave_settings(whole: Measured, source: Path, out: Path) -> None:
    """Settings and sources in `out` too: it is a folder of the study again, and can be joined."""
    settings = out / "config.json"
    if not whole.config or out.resolve() == source.resolve():
        return
    if settings.exists() and _configuration(out)[0] != whole.config:
        raise InputError(f"{settings} holds other settings than {source}: give another --out")
    write_json(settings, {**read_object(source / "config.json"), "config": dict(whole.config)})
    whole.corpora.write(out)


def _refuse_own_place(out: Path, places: Sequence[Path], held: str) -> None:
    if out.resolve() in {folder.resolve() for folder in places}:
        raise InputError(f"{out} holds {held}: give the page of all its own --out")


def _refuse_lost(study: Study, folder: Path) -> None:
    """Raise `InputError` where something that a cell has measured is no longer there."""
    for done in sorted(folder.glob("jobs/*/*/done.json")):
        paths = RunPaths.of_job(done.parent)
        for stage in study.run(read_object(done), str(done)).stages(paths):
            if not stage.is_done():
                raise InputError(
                    f"{paths.run} was finished, but records of its {stage.phase} are missing; the "
                    "study's own command on this folder makes them again"
                )


def _tell_unfinished(folder: Path) -> None:
    """Say whose measurements are not whole: a page shows what there is of them."""
    begun = (at for at in RunPaths.below(folder) if not at.done.exists())
    names = [f"{at.run.parent.name} {at.run.name}" for at in begun if not at.diverged.exists()]
    if names:
        warn(
            f"normattn: of {folder} not finished, and on the page as far as measured: "
            f"{', '.join(names)}"
        )


def _configuration(folder: Path) -> tuple[Mapping[str, Any], str | None]:
    """The settings and the study of a folder, as its config.json holds them."""
    file = folder / "config.json"
    if not file.is_file():
        if (folder / "jobs").is_dir():
            raise InputError(
                f"{file} is gone, and with it the settings of the study whose cells lie beside it: "
                "restore it"
            )
        return {}, None
    stored = read_object(file)
    if not isinstance(stored.get("config"), dict):
        raise InputError(f"{file} is damaged: expected a kind and a config")
    return stored["config"], str(stored.get("kind"))


def _study_of_cells(folder: Path) -> Study | None:
    """The study that a sweep's cells name."""
    for paths in RunPaths.below(folder):
        return _registered(study_named(paths.settings), paths.settings)
    return None


def _registered(name: str, source: Path) -> Study:
    """The study of the library that a file names; a file never chooses code beside them."""
    try:
        return find(name)
    except InputError as error:
        raise InputError(f"{source}: {error} (--study FILE.py)") from error


def _study_of(measured: pl.DataFrame, source: Path) -> Study:
    names = measured["study"].unique().to_list()
    if len(names) != 1:
        raise InputError(f"{source} holds measurements of {len(names)} studies, expected one")
    return _registered(str(names[0]), source)

"""`normattn report`: of a folder with measurements, of a sweep, of single runs, of a gallery."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from normattn.cli import options
from normattn.cli.report_runs import measured_of_runs, runs_below, split_label
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
from normattn.lab.sweep.paths import RunPaths
from normattn.lab.sweep.runner import study_named
from normattn.terminal import warn


class Content(NamedTuple):
    """What is reported: by which study, with its settings, from which measurements."""

    study: Study
    config: Mapping[str, Any]
    measured: pl.DataFrame


def report_folders(asked: options.Report) -> None:
    """Write the report of folders, each RUN or LABEL=RUN, into `out` (else into the first).

    A sweep's directory is collected again; a folder without runs that holds measurements.parquet
    is recomputed from it alone, by the study that the measurements name, or by `asked.study`.
    Several folders of `extend` are compared; of runs each label is a row. Raises `InputError`
    where there is nothing to report.
    """
    labelled = [split_label(text) for text in asked.runs]
    places = [folder for _, folder in labelled]
    for folder in places:
        if not str(folder).strip() or not folder.is_dir():
            raise InputError(f"{str(folder)!r} is no directory of runs or results")
    out = asked.out or places[0]
    content = None
    if not any(label is not None for label, _ in labelled):
        content = _of_a_study(places, out, asked.study)
    if content is None:
        content = Content(find_typed(asked.study or READING), {}, measured_of_runs(labelled))
    with errors_in(content.study), _unusable(places, content.study):
        written = content.study.report(content.measured, out, dict(content.config))
    for folder in places:
        _warn_of_unfinished(folder)
    say(out, written)


def _of_a_study(places: Sequence[Path], out: Path, named: str | None) -> Content | None:
    """What a folder of a study holds, or several of `extend`; None for folders of runs."""
    if len(places) == 1:
        content = _content(places[0], named)
        if content is not None:
            _keep_settings(places[0], content.config, out)
        return content
    if all(_configuration(folder)[1] == EXTEND for folder in places):
        return _gallery(places, out)
    for folder in places:
        if not runs_below(folder) and (folder / measurements.FILE).is_file():
            raise InputError(
                f"{folder} holds results without runs: a report of several folders needs runs, "
                "or measurements of extend"
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


def _content(folder: Path, named: str | None) -> Content | None:
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
            f"{folder} holds measurements of {kind} without a report: run its command again, "
            "which measures nothing twice"
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
    return Content(study, config, measured)


def _configuration(folder: Path) -> tuple[Mapping[str, Any], str | None]:
    """The settings and the study of a folder, as its config.json holds them."""
    file = folder / "config.json"
    if not file.is_file():
        if (folder / "jobs").is_dir():
            raise InputError(
                f"{file} is missing, and it held the settings of the study in that folder: "
                "restore it"
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


def _gallery(places: Sequence[Path], out: Path) -> Content:
    """Models and texts that `extend` measured; their settings are kept in `out` too."""
    if out.resolve() in {folder.resolve() for folder in places}:
        raise InputError(
            f"{out} holds the report of one model on one text: give the joint report another --out"
        )
    measured, config = extend.gathered(places), extend.settings(places)
    kind, name = _configuration(out)[1], extend.GALLERY.name
    if kind not in (None, name):
        raise InputError(f"{out / 'config.json'} belongs to {kind}: give another --out")
    write_json(out / "config.json", {"format": FORMAT, "kind": name, "config": config})
    return Content(extend.GALLERY, config, measured)


def _keep_settings(source: Path, config: Mapping[str, Any], out: Path) -> None:
    """Keep settings and sources in `out`, so that it is a folder of the study."""
    settings = out / "config.json"
    if not config or out.resolve() == source.resolve():
        return
    if settings.exists() and _configuration(out)[0] != config:
        raise InputError(f"{settings} holds other settings than {source}: give another --out")
    write_json(settings, read_object(source / "config.json"))
    Corpora.below(source).write(out)

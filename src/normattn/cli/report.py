"""`normattn report`: report a folder with measurements, a sweep, runs, or several models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from normattn.cli.options import Report
from normattn.cli.report_runs import measured_of_runs, runs_below, split_label
from normattn.errors import InputError, NormattnError
from normattn.io import read_object, write_json
from normattn.lab.report.terminal import print_report
from normattn.lab.runs.directory import FORMAT
from normattn.lab.stats import measurements
from normattn.lab.studies import COMMAND_STUDIES, extend, find, find_typed
from normattn.lab.studies.base import Study
from normattn.lab.studies.extend import KIND as EXTEND
from normattn.lab.studies.reading import KIND as READING
from normattn.lab.sweep.collect import write_corpora
from normattn.lab.sweep.paths import RunPaths
from normattn.lab.sweep.runner import read_run
from normattn.terminal import warn


class Content(NamedTuple):
    """A study, its settings and its measurements."""

    study: Study
    config: Mapping[str, Any]
    measured: pl.DataFrame


def report_folders(options: Report) -> None:
    """Write the report of folders, each RUN or LABEL=RUN, into `out` (default: the first).

    The measurements of a sweep are collected again; a folder without runs uses its
    measurements.parquet, and the study named there or `options.study`.
    """
    labelled = [split_label(text) for text in options.runs]
    folders = [folder for _, folder in labelled]
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{str(folder)!r} is no directory of runs or results")
    out = options.out or folders[0]
    content = None
    if not any(label is not None for label, _ in labelled):
        content = _study_content(folders, out, options.study)
    if content is None:
        content = Content(find_typed(options.study or READING), {}, measured_of_runs(labelled))
    study = content.study
    try:
        written = study.report(content.measured, out, dict(content.config))
    except NormattnError:
        raise
    except (LookupError, ValueError, ArithmeticError, pl.exceptions.PolarsError) as error:
        # A file with a correct digest may still have labels and numbers that no study wrote. In a
        # custom study, these are bugs in its code.
        if study.source is not None:
            raise
        raise InputError(
            f"{', '.join(map(str, folders))} does not hold the measurements that a report of "
            f"{study.name} is made of: {type(error).__name__}: {error}"
        ) from error
    print_report(out, written)


def _study_content(folders: Sequence[Path], out: Path, study: str | None) -> Content | None:
    """Return the content of a study's folder, or of several of `extend`; None for runs.

    Settings and corpora are copied to `out`, so that it is a folder of the study.
    """
    if len(folders) == 1:
        source, content = folders[0], _content(folders[0], study)
        if content is not None and content.config and out.resolve() != source.resolve():
            settings = out / "config.json"
            if settings.exists() and _configuration(out)[0] != content.config:
                raise InputError(
                    f"{settings} holds other settings than {source}: give another --out"
                )
            write_json(settings, read_object(source / "config.json"))
            write_corpora(source, out)
        return content
    if all(_configuration(folder)[1] == EXTEND for folder in folders):
        if study is not None:
            raise InputError(
                "several folders of extend have a report of their own: leave --study out"
            )
        return _gallery(folders, out)
    for folder in folders:
        if not runs_below(folder) and (folder / measurements.FILE).is_file():
            raise InputError(
                f"{folder} holds results without runs: a report of several folders needs runs, "
                "or measurements of extend"
            )
    return None


def _content(folder: Path, study_name: str | None) -> Content | None:
    """Return the content of a study's folder; None for a folder of runs."""
    config, kind = _configuration(folder)
    file = folder / measurements.FILE
    if kind is not None and (folder / "jobs").is_dir():
        study = find_typed(study_name) if study_name else _registered(kind, folder / "config.json")
        measured = study.measurements(folder)
        unfinished = [
            f"{paths.run.parent.name} {paths.run.name}"
            for paths in RunPaths.below(folder)
            if not paths.diverged.exists()
            and not all(stage.is_done() for stage in read_run(paths.settings, study).stages(paths))
        ]
        if unfinished:
            warn(
                f"normattn: of {folder} not finished, and shown as far as measured: "
                f"{', '.join(unfinished)}"
            )
    elif kind in COMMAND_STUDIES and not file.is_file():
        raise InputError(
            f"{folder} holds measurements of {kind} without a report: run its command again, "
            "which measures nothing twice"
        )
    # A report of runs is written into the first of them, which may have new evaluations.
    elif file.is_file() and (kind in COMMAND_STUDIES or not runs_below(folder)):
        measured = measurements.read(file)
        names = measured["study"].unique().to_list()
        if not study_name and len(names) != 1:
            raise InputError(f"{file} holds measurements of {len(names)} studies, expected one")
        study = find_typed(study_name) if study_name else _registered(str(names[0]), file)
    else:
        return None
    return Content(study, config, measured)


def _configuration(folder: Path) -> tuple[Mapping[str, Any], str | None]:
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
    """Return the library's study named in a file. A file cannot choose other code."""
    try:
        return find(name)
    except InputError as error:
        raise InputError(f"{source}: {error} (--study FILE.py)") from error


def _gallery(folders: Sequence[Path], out: Path) -> Content:
    """Return the joint content of several folders of `extend`; write their settings to `out`."""
    if out.resolve() in {folder.resolve() for folder in folders}:
        raise InputError(
            f"{out} holds the report of one model on one text: give the joint report another --out"
        )
    measured, config = extend.combine(folders)
    kind, name = _configuration(out)[1], extend.GALLERY.name
    if kind not in (None, name):
        raise InputError(f"{out / 'config.json'} belongs to {kind}: give another --out")
    write_json(out / "config.json", {"format": FORMAT, "kind": name, "config": config})
    return Content(extend.GALLERY, config, measured)

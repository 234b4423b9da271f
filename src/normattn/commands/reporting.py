"""`normattn report`: the page of a folder that holds its frame, of a sweep, or of single runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from normattn.errors import InputError
from normattn.measure import collected, frame, joined
from normattn.measure.gather import on_common_sets
from normattn.report.terminal import say
from normattn.runs import RunDirectory, read_status
from normattn.structured import read_object
from normattn.studies import OF_COMMANDS, find, gallery
from normattn.studies.extend import KIND as EXTEND
from normattn.sweep.cell import study_of
from normattn.sweep.collect import history
from normattn.sweep.layout import CellPaths
from normattn.sweep.study import Study
from normattn.training import TrainingConfig

READING = "reading"


def report(places: Sequence[Path], out: Path, named: str | None = None) -> None:
    """Write the page of `places` into `out`.

    A sweep's directory is collected again; runs are gathered into one page, and so are several
    folders of `extend`; one folder without
    either that holds measurements.parquet is recomputed from it alone, by the study that the frame
    names, or the one `named`. Raises `InputError` where there is nothing to report.
    """
    for folder in places:
        if not str(folder).strip() or not folder.is_dir():
            raise InputError(f"{str(folder)!r} is no directory of runs or results")
    if len(places) == 1:
        folder = places[0]
        config, kind = _configuration(folder)
        if kind is not None and (folder / "jobs").is_dir():
            study = find(named) if named else _study_of_cells(folder) or find(kind)
            _refuse_lost(study, folder)
            say(out, study.report(study.measurements(folder), out, config))
            return
        # A page made of runs lies among them by default: they may have been measured again since.
        if (folder / frame.FILE).is_file() and (kind in OF_COMMANDS or not _runs(places)):
            measured = frame.read(folder / frame.FILE)
            study = find(named or _study_of(measured, folder / frame.FILE))
            say(out, study.report(measured, out, config))
            return
    if len(places) > 1 and all(_configuration(folder)[1] == EXTEND for folder in places):
        if out.resolve() in {folder.resolve() for folder in places}:
            raise InputError(
                f"{out} holds one model on one text: give the page of all its own --out"
            )
        say(out, gallery.STUDY.report(gallery.gathered(places), out, {}))
        return
    measured = of_runs(places)
    say(out, find(named or READING).report(measured, out, {}))


def _refuse_lost(study: Study, folder: Path) -> None:
    """Raise `InputError` where something that a cell has measured is no longer there."""
    for done in sorted(folder.glob("jobs/*/*/done.json")):
        paths = CellPaths.of_job(done.parent)
        for stage in study.cell(read_object(done), str(done)).stages(paths):
            if not stage.is_done():
                raise InputError(
                    f"{paths.run} was finished, but records of its {stage.phase} are missing; the "
                    "study's own command on this folder makes them again"
                )


def of_runs(places: Sequence[Path]) -> pl.DataFrame:
    """What was measured in every run at or below `places`, divergences and loss curves included."""
    frames, runs = [], _runs(places)
    for run in runs:
        frames.append(collected(run))
        frames += _training(run)
    measured = on_common_sets(joined(frames)) if frames else frame.empty()
    if not measured.filter(pl.col("protocol") != "training").height and not any(
        measured["statistic"] == "diverged"
    ):
        named = ", ".join(map(str, places))
        raise InputError(
            f"nothing was measured in {named}: no run there was evaluated; use normattn evaluate "
            "first"
        )
    return measured.with_columns(pl.lit(READING).alias("study"))


def _runs(places: Sequence[Path]) -> list[Path]:
    """Every directory of a run, in a fixed order."""
    runs: dict[Path, None] = {}
    for folder in places:
        folders = sorted(path.parent for path in folder.rglob("status.json"))
        runs.update(dict.fromkeys(path.resolve() for path in folders))
    return list(runs)


def _training(run: Path) -> list[pl.DataFrame]:
    """The loss curve of a run of a language model, and where it diverged, if it did."""
    stored = RunDirectory.existing(run)
    if "model" not in stored.config or "score" not in stored.config["model"]:
        return []
    config = TrainingConfig.parse(stored.config, str(run / "config.json"))
    name = config.model.score.variant_name
    frames = [history(run, name, config.seed)]
    status = read_status(run)
    if status is not None and status.state == "diverged":
        whose = frame.Identity("", name, str(config.model.score), config.seed, "training")
        edges = [float(status.step)]
        rows = frame.sums("diverged", [status.where], [[1.0]], [[1.0]], axis="step", edges=edges)
        frames.append(frame.identified(whose, [rows]))
    return frames


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
    for paths in CellPaths.below(folder):
        return study_of(paths.settings, find)
    return None


def _study_of(measured: pl.DataFrame, source: Path) -> str:
    names = measured["study"].unique().to_list()
    if len(names) != 1:
        raise InputError(f"{source} holds measurements of {len(names)} studies, expected one")
    return str(names[0])

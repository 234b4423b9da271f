"""From directories of runs to one table: find every record and every divergence, then report."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from normattn.errors import InputError
from normattn.evaluation import EvaluationStore
from normattn.reports import AnyRecord, Divergence, build
from normattn.reports.history import draw_history
from normattn.runs import RunDirectory, read_status
from normattn.sweep.measuring import EVALUATIONS
from normattn.training import TrainingConfig

_ORIGIN = re.compile(r"; it began in (?P<where>.*?); (?:the last good|no) checkpoint")


def tabulate(places: Sequence[Path], out: Path) -> None:
    """Write table.md, .csv, .json and figures/ into `out` from every run at or below `places`.

    Runs that diverged are rows too. Raises `InputError` where there is nothing to report.
    """
    runs = measured_runs(places)
    records, diverged = collected(runs)
    paths = build(records, out, diverged)
    history = draw_history(_histories(runs), out / "figures")
    say_where(out, len(paths.figures) + len(history))


def collected(runs: Sequence[Path]) -> tuple[list[AnyRecord], list[Divergence]]:
    """Every record of the runs, and every run that diverged."""
    records: list[AnyRecord] = []
    diverged: list[Divergence] = []
    for run in runs:
        records += EvaluationStore(run / EVALUATIONS).records()
        found = divergence(run)
        diverged += [found] if found is not None else []
    return records, diverged


def say_where(out: Path, figures: int) -> None:
    """Print where the table and the figures are."""
    said = Console(highlight=False)
    said.print(f"table: {out / 'table.md'}", markup=False, soft_wrap=True)
    said.print(f"figures: {out / 'figures'} ({figures} files)", markup=False)


def _histories(runs: Sequence[Path]) -> dict[str, list[Path]]:
    """The metrics of each variant's runs."""
    found: dict[str, list[Path]] = {}
    for run in runs:
        score = _trained(run).model.score
        found.setdefault(score.variant_name, []).append(run / "metrics.jsonl")
    return found


def _trained(run: Path) -> TrainingConfig:
    return TrainingConfig.parse(RunDirectory.existing(run).config, str(run / "config.json"))


def measured_runs(places: Sequence[Path]) -> list[Path]:
    """Every directory of a run that was measured or has diverged, in a fixed order."""
    found: dict[Path, None] = {}
    for place in places:
        if not place.is_dir():
            raise InputError(f"{place} is no directory of runs")
        folders = [place, *sorted(path for path in place.rglob("*") if path.is_dir())]
        measured = [path for path in folders if _is_run(path)]
        if not measured:
            raise InputError(
                f"nothing was measured in {place}: it holds no evaluation records; "
                "use normattn evaluate first"
            )
        found.update(dict.fromkeys(path.resolve() for path in measured))
    return list(found)


def _is_run(path: Path) -> bool:
    if any((path / EVALUATIONS).glob("*.json")):
        return True
    return (path / "config.json").is_file() and divergence(path) is not None


def divergence(run: Path) -> Divergence | None:
    """How the run in `run` diverged; None when it did not."""
    status = read_status(run)
    if status is None or status.state != "diverged":
        return None
    config = _trained(run)
    model = config.model
    return Divergence(
        variant=model.score.variant_name,
        step=status.step,
        where=origin(status.message),
        seed=config.seed,
        spec=str(model.score),
        train_length=model.train_length,
    )


def origin(message: str) -> str:
    """Where a divergence began, from the sentence that the run's status has of it."""
    found = _ORIGIN.search(message)
    return found["where"] if found else "an unknown place"

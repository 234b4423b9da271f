"""From a request to a table: plan, data, cells under a launcher, tabulation; resumable."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from normattn.io import write_text
from normattn.lab.report.terminal import say, tell
from normattn.lab.runs import RunDirectory
from normattn.lab.sweep.cell import child_arguments, write_cell
from normattn.lab.sweep.corpora import refuse_changed_text
from normattn.lab.sweep.launchers import Job, Launcher, Local, Needs, Outcome, run_jobs
from normattn.lab.sweep.layout import CellPaths, peek
from normattn.lab.sweep.methods import grouped
from normattn.lab.sweep.plan import make_plan, stage_shares, time_range
from normattn.lab.sweep.progress import SweepProgress, headlines
from normattn.lab.sweep.study import (
    CHANGEABLE,
    Cell,
    Request,
    Study,
    Sweep,
    free_settings,
    with_added,
)
from normattn.lab.training.distributed import choose_device
from normattn.lab.training.init_from import HasFingerprint
from normattn.terminal import Console, warn

# Above this number, the sentences about rows left out are only written to a file.
SHOWN_SENTENCES = 12
LEFT_OUT = "left_out.txt"


def reproduce(study: Study, request: Request, only_plan: bool = False) -> list[str]:
    """Run what a study makes of `request`, or only print its plan; return what failed.

    Raises `InputError` before anything is written when it cannot be done, and `Interrupted` when
    stopped; rerunning the command resumes them. A cell that diverged is a result; one that failed
    otherwise is named in the answer, after all others are done.
    """
    sweep = study.resolve(request)
    said = {"changed": dict(request.changes), "asked": (request.choices,)}
    sweep = replace(sweep, config=sweep.config.model_copy(update=said))
    console = Console(highlight=False)
    launcher, needs = request.launcher, needs_of(sweep)
    count = len(sweep.cells)
    at_once = min(request.jobs or launcher.slots(needs) or count, count)
    for cell in _one_of_each_data(sweep):
        for line in cell.workload.look(cell.training_config):
            tell(line, console)
    _print_plan(console, sweep, launcher, at_once, every=only_plan)
    if only_plan:
        return []
    with ExitStack() as stack:
        # What is no sweep, is in use, or has another configuration is refused before any work; a
        # new directory is made only once the corpus has been found good.
        occupied = sweep.out.exists() and (not sweep.out.is_dir() or any(sweep.out.iterdir()))
        if occupied:
            stack.enter_context(_open(sweep).lock())
        _prepare(console, sweep)
        if not occupied:
            stack.enter_context(_open(sweep).lock())
        _note_choices(sweep, request.choices)
        if sweep.skipped:
            sentences = (omission.sentence for omission in sweep.skipped)
            write_text(sweep.out / LEFT_OUT, "\n".join(sentences) + "\n")
        outcomes = _run_cells(study, sweep, launcher, at_once)
        failed = [_failure(outcome) for outcome in outcomes if outcome.failed]
        # Said first: where too few are left, there may be nothing to report.
        for sentence in failed:
            warn(f"normattn: {sentence}")
        if len(failed) < len(sweep.cells):
            report(study, sweep.out, RunDirectory.existing(sweep.out).config)
    return failed


def report(study: Study, out: Path, config: Mapping[str, Any]) -> None:
    """Write the page of what was measured in `out`, and print where it is."""
    say(out, study.report(study.measurements(out), out, config))


def needs_of(sweep: Sweep) -> Needs:
    """What each cell computes on."""
    config = sweep.cells[0].training_config
    return Needs(config.threads, config.device)


def _open(sweep: Sweep) -> RunDirectory:
    stored = peek(sweep.out / "config.json").get("config") or {}
    free = free_settings(stored, sweep.config.model_dump(mode="json")) if stored else CHANGEABLE
    return RunDirectory.open(sweep.out, sweep.config, sweep.study, free)


def _note_choices(sweep: Sweep, choices: dict[str, str]) -> None:
    """Add to the directory's settings what chose further cells: its page says how to make all."""
    run = RunDirectory.existing(sweep.out)
    later = with_added(run.config, sweep.config.model_dump(mode="json"))
    for name in (name for name in later if later[name] != run.config[name]):
        run.put(name, later[name])
    asked = run.config.get("asked") or [{}]
    if choices not in asked:
        run.put("asked", [*asked, choices])


def _print_plan(
    console: Console, sweep: Sweep, launcher: Launcher, at_once: int, every: bool
) -> None:
    title = f"plan: {sweep.study}, preset {sweep.config.preset}"
    table = Table(title=title, show_header=False)
    plan = make_plan(sweep)
    for name, value in plan.lines():
        table.add_row(name, value)
    config = sweep.cells[0].training_config
    if isinstance(launcher, Local) and choose_device(config.device).type == "cpu":
        table.add_row("time on CPU cores", time_range(plan.flops, at_once, config.threads))
    for name, value in sweep.facts:
        table.add_row(name, value)
    table.add_row("runs under", launcher.describe())
    table.add_row("output", str(sweep.out))
    console.print(table)
    sentences = grouped(sweep.skipped)
    if every or len(sentences) <= SHOWN_SENTENCES:
        for sentence in sentences:
            tell(sentence, console)
    else:
        counted = f"{len(sweep.skipped)} rows make no sense and are left out"
        console.print(f"{counted}; {sweep.out / LEFT_OUT} says why", soft_wrap=True)


def _one_of_each_data(sweep: Sweep) -> list[Cell]:
    """The first of the cells that read the same data, for each data."""
    firsts = {cell.reads: cell for cell in reversed(sweep.cells)}
    return list(reversed(firsts.values()))


def _prepare(console: Console, sweep: Sweep) -> None:
    """Prepare the data before the children start; see that it is enough, and as it was before."""
    told: set[str] = set()
    now: dict[str, str] = {}
    for cell in _one_of_each_data(sweep):
        with console.status("preparing the data"):
            data = cell.prepare()
            lines = sweep.describe(cell, data)
        if isinstance(data, HasFingerprint):
            now[cell.reads[1]] = data.fingerprint
        for line in lines:
            if line not in told:
                tell(line, console)
        told |= {*lines}
    # Not by the children's settings: a cell that has none fails alone, the others do not.
    refuse_changed_text(sorted(sweep.out.glob("cells/*/seed*")), now)


def _run_cells(study: Study, sweep: Sweep, launcher: Launcher, at_once: int) -> list[Outcome]:
    work = [_job(study, sweep, cell) for cell in sweep.cells if not is_done(sweep, cell)]
    shares = {cell.name: stage_shares(sweep, cell) for cell in sweep.cells}
    cells = {cell.name: cell for cell in sweep.cells}
    with SweepProgress(work, shares, lambda name: headlines(study, sweep, cells[name])) as progress:
        return run_jobs(work, launcher, at_once, needs_of(sweep), progress)


def is_done(sweep: Sweep, cell: Cell) -> bool:
    """Whether the cell ended before as it is asked for now, and its records are still there."""
    paths = CellPaths.of(sweep.out, cell.variant, cell.seed)
    same = peek(paths.done) == cell.model_dump(mode="json")
    return same and all(stage.is_done() for stage in sweep.stages(cell))


def _job(study: Study, sweep: Sweep, cell: Cell) -> Job:
    """The child of one cell, told what to do by a file of its own."""
    paths = CellPaths.of(sweep.out, cell.variant, cell.seed)
    write_cell(paths.settings, study, cell)
    paths.progress.unlink(missing_ok=True)
    return Job(cell.name, child_arguments("_cell", paths.job, study), paths.log)


def _failure(outcome: Outcome) -> str:
    said = outcome.message.removeprefix("normattn: ")
    return f"{outcome.job.name} failed: {said} (its output is in {outcome.job.log})"

"""From a request to a report: plan, data, runs under a launcher, tabulation; resumable.

Each run is a child process that does, stage by stage, what is not yet done.
"""

from __future__ import annotations

import platform
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from normattn.errors import DivergedError, InputError
from normattn.io import read_object, write_text
from normattn.lab.report.tables import NOTHING
from normattn.lab.report.terminal import say, tell
from normattn.lab.report.view import View
from normattn.lab.runs import RunDirectory
from normattn.lab.runs.environment import keep_pages
from normattn.lab.stats import collected, measurements
from normattn.lab.stats.arrays import on_common_sets
from normattn.lab.sweep.collect import refuse_changed_text
from normattn.lab.sweep.config import CHANGEABLE
from normattn.lab.sweep.launchers import (
    DIVERGED,
    FINISHED,
    Job,
    Launcher,
    Local,
    Needs,
    run_jobs,
)
from normattn.lab.sweep.paths import RunPaths, note_progress, peek, write_if_changed
from normattn.lab.sweep.planner import SweepProgress, make_plan, stage_shares, time_range
from normattn.lab.sweep.run import Experiment, Note, Request, Run, Sweep
from normattn.lab.training.distributed import choose_device
from normattn.lab.training.init_from import HasFingerprint
from normattn.locks import InUseError, locked
from normattn.stopping import stop_with_parent
from normattn.terminal import Console, warn

PROGRESS_SECONDS = 0.5
LOCK_SECONDS = 120.0
# Above this number, the sentences about rows left out are only written to a file.
SHOWN_SENTENCES = 12
LEFT_OUT = "left_out.txt"


def reproduce(study: Experiment, request: Request, only_plan: bool = False) -> list[str]:
    """Run what a study makes of `request`, or only print its plan; return what failed.

    Raises `InputError` before anything is written when it cannot be done, and `Interrupted` when
    stopped; rerunning the command resumes them. A run that diverged is a result; one that failed
    otherwise is named in the answer, after all others are done.
    """
    sweep = study.resolve(request)
    asked = {"changed": dict(request.changes), "asked": (request.choices,)}
    sweep = replace(sweep, config=sweep.config.model_copy(update=asked))
    console = Console(highlight=False)
    launcher, count, first = request.launcher, len(sweep.runs), sweep.runs[0].training_config
    needs = Needs(first.threads, first.device)
    at_once = min(request.jobs or launcher.slots(needs) or count, count)
    for run in _one_of_each_data(sweep):
        for line in run.training_config.data.look():
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
        directory = RunDirectory.existing(sweep.out)
        # What chose further runs is added to the settings: the page says how to make all.
        choices = directory.config.get("asked") or [{}]
        if request.choices not in choices:
            directory.put("asked", [*choices, request.choices])
        for lock in (sweep.paths(run).lock for run in sweep.runs):
            # A worker that a killed command left behind saves its state first; stderr says so. One
            # that still has its command keeps its lock: a new worker waits, and its log says so.
            if lock.exists():
                with suppress(InUseError), locked(lock, 0.0):
                    pass
        if sweep.skipped:
            write_text(sweep.out / LEFT_OUT, "\n".join(sweep.skipped) + "\n")
        runs = {run.name: run for run in sweep.runs}
        jobs = [_job(study, sweep, run) for run in sweep.runs if not is_done(sweep, run)]
        shares = {job.name: stage_shares(sweep, runs[job.name]) for job in jobs}
        with SweepProgress(jobs, shares, lambda name: _rows(study, sweep, runs[name])) as progress:
            outcomes = run_jobs(jobs, launcher, at_once, needs, progress)
        failed = [
            f"{outcome.job.name} failed: {outcome.message.removeprefix('normattn: ')} (its output "
            f"is in {outcome.job.log})"
            for outcome in outcomes
            if outcome.failed
        ]
        # Printed first: where too few are left, there may be nothing to report.
        for sentence in failed:
            warn(f"normattn: {sentence}")
        if len(failed) < len(sweep.runs):
            config = RunDirectory.existing(sweep.out).config
            say(sweep.out, study.report(study.measurements(sweep.out), sweep.out, config))
    return failed


def _open(sweep: Sweep) -> RunDirectory:
    return RunDirectory.open(sweep.out, sweep.config, sweep.study, CHANGEABLE)


def _print_plan(
    console: Console, sweep: Sweep, launcher: Launcher, at_once: int, every: bool
) -> None:
    title = f"plan: {sweep.study}, preset {sweep.config.preset}"
    table = Table(title=title, show_header=False)
    plan = make_plan(sweep)
    for name, value in plan.lines():
        table.add_row(name, value)
    config = sweep.runs[0].training_config
    if isinstance(launcher, Local) and choose_device(config.device).type == "cpu":
        table.add_row("time on CPU cores", time_range(plan, at_once, config.threads))
    for name, value in sweep.facts:
        table.add_row(name, value)
    table.add_row("runs under", launcher.describe())
    table.add_row("output", str(sweep.out))
    console.print(table)
    if every or len(sweep.skipped) <= SHOWN_SENTENCES:
        for sentence in sweep.skipped:
            tell(sentence, console)
    else:
        tell(f"Some rows are left out; {sweep.out / LEFT_OUT} says why", console)


def _one_of_each_data(sweep: Sweep) -> list[Run]:
    """The first of the runs that read the same data, for each data."""
    firsts = {run.reads: run for run in reversed(sweep.runs)}
    return list(reversed(firsts.values()))


def _prepare(console: Console, sweep: Sweep) -> None:
    """Prepare the data before the children start; see that it is enough, and as it was before."""
    printed: dict[str, None] = {}
    now: dict[str, str] = {}
    for run in _one_of_each_data(sweep):
        with console.status("preparing the data"):
            data = run.training_config.prepare()
            lines = sweep.describe(run, data)
        if isinstance(data, HasFingerprint):
            now[run.reads[1]] = data.fingerprint
        for line in lines:
            if line not in printed:
                tell(line, console)
        printed |= dict.fromkeys(lines)
    # Not by the children's settings: a run that has none fails alone, the others do not.
    refuse_changed_text(sorted(sweep.out.glob("cells/*/seed*")), now)


def is_done(sweep: Sweep, run: Run) -> bool:
    """Whether this run has ended with the same request, and its records still exist."""
    same = peek(sweep.paths(run).done) == run.model_dump(mode="json")
    return same and all(stage.is_done() for stage in sweep.stages(run))


def _job(study: Experiment, sweep: Sweep, run: Run) -> Job:
    """The child process of one run, which reads its task from its own file.

    The file holds the study's name and never a path: what is read from a file must not choose code.
    A user's study file comes along as an argument.
    """
    paths = sweep.paths(run)
    write_if_changed(paths.settings, {"study": study.name, **run.model_dump(mode="json")})
    paths.progress.unlink(missing_ok=True)
    named = str(study.source.resolve()) if study.source else study.name
    return Job(run.name, ("-m", "normattn", "_cell", "--study", named, str(paths.job)), paths.log)


def _rows(study: Experiment, sweep: Sweep, run: Run) -> list[str]:
    """What the study's `headline` columns say of one run: a line for each of its rows.

    "  KNA-YaRN: train length 31.2, change −2.1". These are values of this run's seed alone,
    without intervals; the page at the end has those.
    """
    if not study.headline:
        return []
    view = View(on_common_sets(collected(sweep.paths(run).run), ()))
    table = study.page.tables[0]
    columns = table.columns(view) if callable(table.columns) else table.columns
    shown = [replace(column, interval=False) for column in columns if column.key in study.headline]
    lines = []
    for row in table.rows(view):
        cells = [(column.title, column.cell(view, row)) for column in shown]
        said = [f"{title} {made.text}" for title, made in cells if made is not NOTHING]
        lines.append(f"  {row.label}: {', '.join(said)}")
    return lines


def run_child(job: Path, study: Experiment, parent: int = 0) -> int:
    """Do what `job`/cell.json says and is not yet done; return the exit code (0, or 3: diverged).

    The file must be of `study`. `parent` is the process without which this one is to stop (0:
    none). Stopped, training saves a checkpoint, and evaluations are whole or absent.
    """
    if parent:
        stop_with_parent(parent)
    paths = RunPaths.of_job(job)
    run = read_run(paths.settings, study)
    with ExitStack() as stack:
        stack.enter_context(keep_pages())
        try:  # An orphan of a killed parent first saves its state and goes.
            stack.enter_context(locked(paths.lock, LOCK_SECONDS))
        except InUseError as error:
            raise InputError(
                f"process {error.holder} has worked on {paths.job} for {LOCK_SECONDS:.0f} s; stop "
                "it first"
            ) from error
        data = run.training_config.prepare()
        for number, stage in enumerate(run.stages(paths)):
            try:
                stage.run(data, _noting(paths.progress, number, stage.phase))
            except DivergedError as error:
                lost = measurements.diverged(run.identity("training"), error.step, error.where)
                measurements.write(paths.diverged, lost)
                warn(f"normattn: {error}")
                return DIVERGED
        write_if_changed(paths.done, run.model_dump(mode="json"))
    return FINISHED


def read_run(settings: Path, study: Experiment) -> Run:
    """The run that a cell.json describes; `InputError` where it names another study."""
    named = study_named(settings)
    if named != study.name:
        raise InputError(f"{settings} belongs to the study {named!r:.100}, not of {study.name}")
    fields = {name: value for name, value in read_object(settings).items() if name != "study"}
    return study.run(fields, str(settings))


def study_named(settings: Path) -> str:
    """The name of the study that a cell.json says it is of; it may be no study's."""
    named = read_object(settings).get("study")
    if not isinstance(named, str):
        raise InputError(f"{settings} names no study")
    return named


def _noting(path: Path, stage: int, phase: str) -> Note:
    """Write a note of how far a stage is, twice a second at most."""
    due = 0.0

    def note(done: int, total: int, text: str) -> None:
        nonlocal due
        if time.monotonic() >= due or done == total:
            due = time.monotonic() + PROGRESS_SECONDS
            facts = {"stage": stage, "phase": phase, "done": done, "total": total, "text": text}
            note_progress(path, {**facts, "host": platform.node()})

    return note

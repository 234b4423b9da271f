"""Run a study: plan, prepare the data, run each run as a child process, write the report."""

from __future__ import annotations

import platform
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from normattn.errors import DivergedError, InputError
from normattn.io import read_object, write_json
from normattn.lab.report.tables import EMPTY_CELL
from normattn.lab.report.terminal import print_line, print_report
from normattn.lab.report.view import View
from normattn.lab.runs import RunDirectory
from normattn.lab.runs.environment import keep_pages
from normattn.lab.stats import measurements, read_measurements
from normattn.lab.stats.arrays import keep_common_data
from normattn.lab.sweep.collect import refuse_changed_text
from normattn.lab.sweep.config import CHANGEABLE
from normattn.lab.sweep.launchers import DIVERGED, FINISHED, Job, Launcher, Local, Needs, run_jobs
from normattn.lab.sweep.paths import RunPaths, write_progress
from normattn.lab.sweep.planner import SweepProgress, make_plan, time_range
from normattn.lab.sweep.run import Experiment, Progress, Request, Run, Sweep
from normattn.lab.training.distributed import choose_device
from normattn.locks import InUseError, locked
from normattn.stopping import stop_with_parent
from normattn.terminal import Console, warn

PROGRESS_SECONDS = 0.5
LOCK_SECONDS = 120.0


def reproduce(study: Experiment, request: Request, only_plan: bool = False) -> list[str]:
    """Run a study as requested, or only print its plan; return a sentence for each failed run.

    Raises `InputError` before anything is written where the request is impossible, `Interrupted`
    when stopped; the same command resumes. A run that diverged is a result. One that fails
    otherwise does not stop the others.
    """
    sweep = study.resolve(request)
    options = {"changed": dict(request.changes), "asked": (request.choices,)}
    sweep = replace(sweep, config=sweep.config.model_copy(update=options))
    console = Console(highlight=False)
    launcher, count, first = request.launcher, len(sweep.runs), sweep.runs[0].training_config
    needs = Needs(first.threads, first.device)
    slots = launcher.slots(needs)  # Also where `jobs` is given: it refuses unsuitable settings.
    at_once = min(request.jobs or slots or count, count)
    for run in _one_of_each_data(sweep):
        for line in run.training_config.data.plan_notes():
            print_line(line, console)
    _print_plan(console, sweep, launcher, at_once)
    if only_plan:
        return []
    with ExitStack() as stack:
        # Check and lock an existing directory before any work; make a new one after checking data.
        occupied = sweep.out.exists() and (not sweep.out.is_dir() or any(sweep.out.iterdir()))
        if occupied:
            stack.enter_context(_open(sweep).lock())
        _prepare(console, sweep)
        if not occupied:
            stack.enter_context(_open(sweep).lock())
        directory = RunDirectory.existing(sweep.out)
        # The report shows the commands of all runs, so the options of each command are recorded.
        choices = directory.config.get("asked") or [{}]
        if request.choices not in choices:
            directory.put("asked", [*choices, request.choices])
        # Workers that a killed command left behind save their state and end. One whose command
        # still runs keeps its lock; a new worker waits for it.
        for lock in (sweep.paths(run).lock for run in sweep.runs):
            if lock.exists():
                with suppress(InUseError), locked(lock, 0.0):
                    pass
        failed = _run_all(study, sweep, launcher, at_once, needs)
        # Print before the report, which is missing where every run failed.
        for sentence in failed:
            warn(f"normattn: {sentence}")
        if len(failed) < len(sweep.runs):
            measured = study.measurements(sweep.out)
            print_report(sweep.out, study.report(measured, sweep.out, directory.config))
    return failed


def _run_all(
    study: Experiment, sweep: Sweep, launcher: Launcher, at_once: int, needs: Needs
) -> list[str]:
    """Run all unfinished runs; return a sentence for each that failed.

    A child reads its settings from a file, which names the study but never a path: no file may
    choose which code runs. The path of a user's study is an argument.
    """
    runs = {run.name: run for run in sweep.runs if not is_done(sweep, run)}
    name = str(study.source.resolve()) if study.source else study.name
    jobs, shares = list[Job](), dict[str, list[float]]()
    for run in runs.values():
        paths = sweep.paths(run)
        write_json(paths.settings, {"study": study.name, **run.model_dump(mode="json")})
        paths.progress.unlink(missing_ok=True)
        arguments = ("-m", "normattn", "_cell", "--study", name, str(paths.job))
        jobs.append(Job(run.name, arguments, paths.log))
        flops = [stage.cost().flops for stage in sweep.stages(run)]
        shares[run.name] = [part / sum(flops) for part in flops]
    with SweepProgress(jobs, shares, lambda name: _rows(study, sweep, runs[name])) as progress:
        outcomes = run_jobs(jobs, launcher, at_once, needs, progress)
    return [
        f"{outcome.job.name} failed: {outcome.message} (its output is in {outcome.job.log})"
        for outcome in outcomes
        if outcome.code not in (FINISHED, DIVERGED)
    ]


def _open(sweep: Sweep) -> RunDirectory:
    return RunDirectory.open(sweep.out, sweep.config, sweep.study, CHANGEABLE)


def _print_plan(console: Console, sweep: Sweep, launcher: Launcher, at_once: int) -> None:
    title = f"plan: {sweep.study}, preset {sweep.config.preset}"
    table, plan = Table(title=title, show_header=False), make_plan(sweep)
    for fact in plan.facts.items():
        table.add_row(*fact)
    config = sweep.runs[0].training_config
    if isinstance(launcher, Local) and choose_device(config.device).type == "cpu":
        table.add_row("time on CPU cores", time_range(plan, at_once, config.threads))
    table.add_row("runs under", launcher.describe())
    table.add_row("output", str(sweep.out))
    console.print(table)
    for sentence in sweep.skipped:
        print_line(sentence, console)


def _one_of_each_data(sweep: Sweep) -> list[Run]:
    """The first run of each data set."""
    firsts = {run.data_key: run for run in reversed(sweep.runs)}
    return list(reversed(firsts.values()))


def _prepare(console: Console, sweep: Sweep) -> None:
    """Prepare the data before the children start; check its size, and that it has not changed."""
    printed: dict[str, None] = {}
    now: dict[str, str] = {}
    for run in _one_of_each_data(sweep):
        with console.status("preparing the data"):
            data = run.training_config.prepare()
            lines = sweep.describe(run, data)
        now[run.data_key[1]] = data.fingerprint
        for line in lines:
            if line not in printed:
                print_line(line, console)
        printed |= dict.fromkeys(lines)
    # Find runs by their folders: one without settings in jobs/ must not fail the others.
    refuse_changed_text(sorted(sweep.out.glob("cells/*/seed*")), now)


def is_done(sweep: Sweep, run: Run) -> bool:
    """Whether nothing is left to do in this run."""
    return all(stage.is_done() for stage in sweep.stages(run))


def _rows(study: Experiment, sweep: Sweep, run: Run) -> list[str]:
    """The main columns of the study's first table for one run, a line for each row."""
    table = study.page.tables[0]
    if not table.main:
        return []
    view = View(keep_common_data(read_measurements(sweep.paths(run).run)))
    columns = table.columns(view) if callable(table.columns) else table.columns
    headline = [replace(c, interval=False) for c in columns if c.key in table.main]
    lines = []
    for row in table.rows(view):
        cells = [(column.title, column.cell(view, row)) for column in headline]
        values = [f"{title} {cell.text}" for title, cell in cells if cell is not EMPTY_CELL]
        lines.append(f"  {row.label}: {', '.join(values)}")
    return lines


def run_child(job: Path, study: Experiment, parent: int = 0) -> int:
    """Execute the unfinished stages of the run in `job`; return the exit code (3: diverged).

    The run must be of `study`. This process stops when the process `parent` ends (0: never). A
    stopped training saves a checkpoint; evaluations are complete or absent.
    """
    if parent:
        stop_with_parent(parent)
    paths = RunPaths.of_job(job)
    run = read_run(paths.settings, study)
    with ExitStack() as stack:
        stack.enter_context(keep_pages())
        try:  # An orphan of a killed command saves its state and ends first.
            stack.enter_context(locked(paths.lock, LOCK_SECONDS))
        except InUseError as error:
            raise InputError(
                f"process {error.holder} has worked on {paths.job} for {LOCK_SECONDS:.0f} s; stop "
                "it first"
            ) from error
        data = run.training_config.prepare()
        for number, stage in enumerate(run.stages(paths)):
            try:
                stage.run(data, _progress_writer(paths.progress, number, stage.phase))
            except DivergedError as error:
                diverged = measurements.diverged(run.identity("training"), error.step, error.where)
                measurements.write(paths.diverged, diverged)
                warn(f"normattn: {error}")
                return DIVERGED
    return FINISHED


def read_run(settings: Path, study: Experiment) -> Run:
    """The run of a cell.json; raises `InputError` where it names another study."""
    fields = read_object(settings)
    name = fields.pop("study", None)
    if not isinstance(name, str):
        raise InputError(f"{settings} names no study")
    if name != study.name:
        raise InputError(f"{settings} belongs to the study {name!r:.100}, not to {study.name}")
    return study.run(fields, str(settings))


def _progress_writer(path: Path, stage: int, phase: str) -> Progress:
    """A function that writes the progress of a stage, at most twice a second."""
    due = 0.0

    def write(done: int, total: int, text: str) -> None:
        nonlocal due
        if time.monotonic() >= due or done == total:
            due = time.monotonic() + PROGRESS_SECONDS
            facts = {"stage": stage, "phase": phase, "done": done, "total": total, "text": text}
            write_progress(path, {**facts, "host": platform.node()})

    return write

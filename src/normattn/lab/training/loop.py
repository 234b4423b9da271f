"""The training loop: resume, step, record, checkpoint, stop. Generic over tasks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from normattn.errors import DivergedError, InputError, Interrupted
from normattn.lab.runs import (
    Checkpoint,
    MetricsLog,
    RunDirectory,
    RunStatus,
    describe_environment,
    record_environment,
)
from normattn.lab.runs.timing import threads
from normattn.lab.training.config import LoopConfig
from normattn.lab.training.distributed import World, world
from normattn.lab.training.divergence import find_origin
from normattn.lab.training.progress import ProgressBar
from normattn.lab.training.state import pack, unpack
from normattn.lab.training.step import StepValues, TrainStep
from normattn.lab.training.task import (
    Callback,
    Probe,
    StepReport,
    Task,
    TrainingResult,
    derive_seed,
)
from normattn.lab.training.trackers import Tracking
from normattn.stopping import StopRequest
from normattn.terminal import warn

STATUS_SECONDS = 5.0
# A checkpoint that takes long is written less often: at most this share of the time goes into it.
CHECKPOINT_SHARE = 0.05

OnStep = Callable[[StepReport], None]


def train(
    make_task: Callable[[World], Task],
    config: LoopConfig,
    run: RunDirectory,
    *,
    on_step: OnStep | None = None,
    should_stop: Callable[[], bool] | None = None,
    callbacks: Sequence[Callback] = (),
    probes: Sequence[Probe] = (),
    show_progress: bool = True,
    export: Callable[[Task], None] | None = None,
    export_kept: Callable[[Task, int], None] | None = None,
) -> TrainingResult:
    """Train to `config.steps`, going on from the run's last checkpoint; return the final values.

    `make_task` builds the task for a process's place in the world, after torch's generators are
    seeded. `export` runs once at the end, on the writing process, before the run counts as
    finished; `export_kept` after each step of `config.keep`, on the same process.
    `probes` look into chosen steps and leave lines beside the metrics. `should_stop` is asked once
    a step. Under torchrun every process calls this.

    On CPU in fp32, with the same versions and thread count, a run that was stopped anywhere and
    resumed gives the same metrics, bit for bit, as one that never was.

    Raises `Interrupted` after SIGINT, SIGTERM or `should_stop`, with the state saved;
    `DivergedError` when the loss or gradient norm is not finite; `InputError` when the directory
    is in use, holds no whole checkpoint, or cannot be written.
    """
    with ExitStack() as stack:
        process = stack.enter_context(world(config.device))
        stack.enter_context(threads(config.threads))
        # The caller's own draws go on as if nothing had been trained.
        cuda = [process.device] if process.device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        followers = list(callbacks)
        # Before anything is written: a tracker that is not installed leaves no run behind.
        process.on_main(lambda: followers.extend(_trackers(config, run)))
        process.on_main(lambda: stack.enter_context(run.lock()))
        request = stack.enter_context(StopRequest())
        torch.manual_seed(derive_seed(config.seed, "initialisation"))
        task = make_task(process)
        stop = _StopAsked(request, should_stop)
        stepper = TrainStep(task, config, process, stop)
        stack.callback(stepper.close)
        if process.main and show_progress:
            followers.append(ProgressBar())
        on_step, probes = (on_step, probes) if process.main else (None, ())
        loop = _Loop(stepper, run, stop, followers, probes, on_step, export_kept)
        result = loop.run_to_end()
        with stepper.parallel.gathered(task.model):
            process.on_main(lambda: _finish(run, config.steps, task, export))
        return result


def _trackers(config: LoopConfig, run: RunDirectory) -> list[Callback]:
    return [] if config.track is None else [Tracking(config.track, run, config.log_every)]


def _finish(
    run: RunDirectory, steps: int, task: Task, export: Callable[[Task], None] | None
) -> None:
    if export is not None:
        export(task)
    run.set_status("finished", steps, steps)


class _StopAsked:
    """A stop by signal, by `should_stop` or by a failure of this process, and a name for it."""

    def __init__(self, request: StopRequest, should_stop: Callable[[], bool] | None) -> None:
        self._request = request
        self._should_stop = should_stop
        self.failure: Exception | None = None

    def __call__(self) -> bool:
        if self.failure is not None:
            return True
        if self._request.by is None and self._should_stop is not None and self._should_stop():
            self._request.by = "the caller's request"
        return self._request.by is not None

    @property
    def by(self) -> str:
        return self._request.by or "another process of the group"


class _Loop:
    """One pass from the last checkpoint to the end."""

    def __init__(
        self,
        stepper: TrainStep,
        run: RunDirectory,
        stop: _StopAsked,
        callbacks: Sequence[Callback],
        probes: Sequence[Probe],
        on_step: OnStep | None,
        export_kept: Callable[[Task, int], None] | None,
    ) -> None:
        self.stepper = stepper
        self.config = stepper.config
        self.world = stepper.world
        self.parallel = stepper.parallel
        self.task = stepper.task
        self.run = run
        self.stop = stop
        self.callbacks = callbacks
        names = [probe.name for probe in probes]
        if len(set(names)) != len(names):
            raise InputError(f"two probes would write one file: they are called {sorted(names)}")
        self.probes = [(probe, MetricsLog(run.path / f"{probe.name}.jsonl")) for probe in probes]
        self.on_step = on_step
        self.export_kept = export_kept
        self.timing = MetricsLog(run.path / "timing.jsonl")
        self.saved_step = 0
        self.last: StepReport | None = None
        self._found: Checkpoint | None = None

    def run_to_end(self) -> TrainingResult:
        """Take the remaining steps."""
        start = self._resume()
        self._begin_clocks(start)
        self._alone(lambda: self._tell_start(start))
        try:
            for step in range(start + 1, self.config.steps + 1):
                values = self._take(step)
                if not values.finite:
                    self._diverge(step, values)
                self._alone(partial(self._report, step, values))
                # Before any checkpoint of this step: a resumed run finds every kept model there.
                if step in self.config.keep:
                    self._keep(step)
                if values.stop and step < self.config.steps:
                    self._interrupt(step)
                self._alone(partial(self._save_when_due, step))
            self._save_for_all(self.config.steps)
        finally:
            for callback in self.callbacks:
                callback.stop()
            if self.world.main:
                self.run.metrics.close()
                self.timing.close()
                for _, log in self.probes:
                    log.close()
        return self._result()

    def _alone(self, work: Callable[[], object]) -> None:
        """Do what this process does while others go on.

        Where there are others, an error stops all of them after the next step: they would wait.
        """
        try:
            work()
        except Exception as error:
            if self.world.size == 1:
                raise
            self.stop.failure = self.stop.failure or error

    def _raise_failure(self) -> None:
        """Raise on every process what went wrong on the first one, if anything did."""

        def failed() -> None:
            if self.stop.failure is not None:
                raise self.stop.failure

        self.world.on_main(failed)

    def _save_for_all(self, step: int) -> None:
        """Save, and raise on every process what the first one could not do."""
        self._alone(lambda: self._save(step))
        self.parallel.settle()
        self._raise_failure()

    def _tell_start(self, start: int) -> None:
        for callback in self.callbacks:
            callback.start(start, self.config.steps)

    def _take(self, step: int) -> StepValues:
        """One step, with those probes around it that are due."""
        with ExitStack() as stack:
            due: list[tuple[MetricsLog, Callable[[], Mapping[str, Any]]]] = []

            def enter() -> None:
                for probe, log in self.probes:
                    if probe.due(step, self.config.steps):
                        due.append((log, stack.enter_context(probe.around(self.task, step))))

            def read() -> None:
                for log, line in due:
                    log.append({"step": step, **line()})

            self._alone(enter)
            values = self.stepper.step(step)
            if values.finite:
                self._alone(read)
        return values

    def _resume(self) -> int:
        """Load the last whole checkpoint, bring the files in line with it; return its step."""
        step, meta = self.world.on_main(self._prepare_files)
        if step > 0:
            # The writing process has read it already, to see whether it is whole.
            checkpoint, self._found = self._found, None
            if checkpoint is None:
                checkpoint = self.run.checkpoints.load(step)
            tensors = self.parallel.load(checkpoint, self.task.model)
            unpack(tensors, self.task.model, self.stepper.optimiser)
            self.stepper.scaler.load_state_dict(meta.get("loss_scale", {}))
            self.last = StepReport(**meta["last"])
        self.saved_step = step
        return step

    def _prepare_files(self) -> tuple[int, dict[str, Any]]:
        """On the writing process: pick the checkpoint, cut the metrics, record the environment."""
        checkpoint = self._found = self.run.checkpoints.latest()
        step = checkpoint.step if checkpoint else 0
        self.run.checkpoints.set_aside_after(step)
        lines = self.run.metrics.truncate_after(step)
        for _, log in self.probes:
            log.truncate_after(step)
        if checkpoint and lines != checkpoint.meta["metrics_lines"]:
            warn(
                f"warning: {self.run.metrics.path} holds {lines} lines up to step {step}, but "
                f"{checkpoint.meta['metrics_lines']} were written; the rest is lost"
            )
        self._record_environment(step)
        self.run.set_status("running", step, self.config.steps)
        return step, checkpoint.meta if checkpoint else {}

    def _record_environment(self, step: int) -> None:
        current = describe_environment(
            device=str(self.world.device.type),
            precision=self.config.precision,
            processes=self.world.size,
            compile=self.config.compile,
        )
        changed = record_environment(self.run.path / "environment.json", current, step)
        if changed:
            warn(
                f"warning: {self.run.path} resumes at step {step} in another environment "
                f"({'; '.join(changed)}); its digits may differ from those of a run never stopped"
            )

    def _begin_clocks(self, start: int) -> None:
        now = time.monotonic()
        self.started = now
        self.started_step = start
        self.status_due = now + STATUS_SECONDS
        self.save_due = now + self.config.checkpoint_seconds

    def _report(self, step: int, values: StepValues) -> None:
        """Log a step and tell whoever listens."""
        seconds = time.monotonic() - self.started
        per_step = self.task.tokens_per_step
        report = StepReport(
            step,
            self.config.steps,
            values.loss,
            values.gradient_norm,
            values.learning_rate,
            values.metrics,
            step * per_step,
            (step - self.started_step) * per_step / max(seconds, 1e-9),
            seconds,
        )
        self.last = report
        if not self.world.main:
            return
        if step % self.config.log_every == 0 or step in (1, self.config.steps):
            self.run.metrics.append(
                {
                    "step": step,
                    "loss": values.loss,
                    **values.metrics,
                    "gradient_norm": values.gradient_norm,
                    "learning_rate": values.learning_rate,
                    "tokens": report.tokens,
                }
            )
        for callback in self.callbacks:
            callback.step(report)
        if self.on_step is not None:
            self.on_step(report)

    def _keep(self, step: int) -> None:
        """Leave the model as it is now."""
        export = self.export_kept
        if export is not None:
            with self.parallel.gathered(self.task.model):
                self.world.on_main(lambda: export(self.task, step))

    def _save_when_due(self, step: int) -> None:
        if self.parallel.due(lambda: time.monotonic() >= self.save_due):
            self._save(step)
        elif self.world.main and time.monotonic() >= self.status_due:
            self._write_status(step)

    def _write_status(self, step: int) -> None:
        self.run.set_status("running", step, self.config.steps)
        if self.last is not None:
            rate = round(self.last.tokens_per_second, 1)
            self.timing.append(
                {"step": step, "seconds": round(self.last.seconds, 3), "tokens_per_second": rate}
            )
        self.status_due = time.monotonic() + STATUS_SECONDS

    def _save(self, step: int) -> None:
        """Write the checkpoint of `step`, unless its weights are not finite.

        Where processes hold parts, what is begun here is finished by `settle`.
        """
        if not self.parallel.writes or step == self.saved_step:
            return
        if not self.parallel.finite(self.task.model):
            return
        before = time.monotonic()
        self._alone(self._flush_logs)
        if not self.parallel.due(lambda: self.stop.failure is None):
            return
        tensors = pack(self.task.model, self.stepper.optimiser)
        meta = {"metrics_lines": self.run.metrics.lines, "last": _as_json(self.last)}
        if self.stepper.scaler.is_enabled():
            meta["loss_scale"] = self.stepper.scaler.state_dict()
        self.parallel.save(self.run.checkpoints, step, tensors, meta)
        self.saved_step = step
        if self.world.main:
            self._write_status(step)
        now = time.monotonic()
        every = self.config.checkpoint_seconds
        self.save_due = now + (max(every, (now - before) / CHECKPOINT_SHARE) if every else 0.0)

    def _flush_logs(self) -> None:
        for log in (self.run.metrics, *(log for _, log in self.probes)):
            log.flush()

    def _interrupt(self, step: int) -> None:
        self._raise_failure()
        message = f"stopped by {self.stop.by} after step {step} of {self.config.steps}"
        self._save_for_all(step)
        steps = self.config.steps
        self.world.on_main(lambda: self.run.set_status("interrupted", step, steps, message))
        raise Interrupted(f"{message}; rerun the command to resume from there")

    def _diverge(self, step: int, values: StepValues) -> None:
        """Save the state before the bad step, find where it began, say both and stop."""
        origin: str | None = "a module not searched for (resume with parallel ddp to have it named)"
        self.stepper.undo_buffers()
        if self.parallel.searched:
            origin = self.world.first_of(find_origin(self.stepper, step))
            # The search went through the bad step once more.
            self.stepper.undo_buffers()
        where = origin or (
            f"the gradient norm ({values.gradient_norm}), every loss and gradient being finite"
        )
        if step > 1:
            self._save_for_all(step - 1)
        kept = self.world.on_main(self.run.checkpoints.last_path)
        error = DivergedError(step, where, str(kept) if kept else None)
        if self.world.main:
            status = RunStatus(
                "diverged", step, self.config.steps, str(error), where, error.checkpoint
            )
            self._flush_logs()
            self.run.write_status(status)
        raise error

    def _result(self) -> TrainingResult:
        assert self.last is not None
        return TrainingResult(
            self.run.path, self.config.steps, self.last.tokens, self.last.loss, self.last.metrics
        )


def _as_json(report: StepReport | None) -> dict[str, Any] | None:
    """A report as JSON, without its clock times: checkpoints of equal runs are equal."""
    if report is None:
        return None
    return {
        "step": report.step,
        "steps": report.steps,
        "loss": report.loss,
        "gradient_norm": report.gradient_norm,
        "learning_rate": report.learning_rate,
        "metrics": dict(report.metrics),
        "tokens": report.tokens,
        "tokens_per_second": 0.0,
        "seconds": 0.0,
    }

"""The training loop: resume, step, record, checkpoint, stop. Generic over tasks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from normattn.errors import DivergedError, InputError, Interrupted
from normattn.lab.runs import (
    Checkpoint,
    MetricsLog,
    RunDirectory,
    describe_environment,
    record_environment,
)
from normattn.lab.runs.environment import threads
from normattn.lab.training.config import LoopConfig
from normattn.lab.training.distributed import World, world
from normattn.lab.training.divergence import find_origin
from normattn.lab.training.progress import ProgressBar
from normattn.lab.training.state import pack, unpack
from normattn.lab.training.step import StepValues, TrainStep
from normattn.lab.training.task import (
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


def train(
    make_task: Callable[[World], Task],
    config: LoopConfig,
    run: RunDirectory,
    *,
    on_step: Callable[[StepReport], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    probes: Sequence[Probe] = (),
    show_progress: bool = True,
    export: Callable[[Task], None] | None = None,
    export_kept: Callable[[Task, int], None] | None = None,
) -> TrainingResult:
    """Train to `config.steps`, going on from the run's last checkpoint; return the final values.

    `make_task` builds the task for a process's place in the world, after torch's generators are
    seeded. `export` runs once at the end, on the writing process, before the run counts as
    finished; `export_kept` after each step of `config.keep`, on the same process. `on_step` gets a
    report of each step, and `probes` look into chosen steps and write lines to files of their own,
    both on the first process. `should_stop` is asked once a step. Under torchrun every process
    calls this.

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
        followers: list[ProgressBar | Tracking] = []
        if config.track is not None:
            # Before anything is written: a tracker that is not installed leaves no run behind.
            track, every = config.track, config.log_every
            process.on_main(lambda: followers.append(Tracking(track, run, every)))
        process.on_main(lambda: stack.enter_context(run.lock()))
        request = stack.enter_context(StopRequest())
        torch.manual_seed(derive_seed(config.seed, "initialisation"))
        task = make_task(process)
        if process.main and show_progress:
            followers.append(ProgressBar())
        if not process.main:
            on_step, probes = None, ()
        loop = _Loop(task, config, run, process, request, should_stop)
        stack.callback(loop.stepper.close)
        result = loop.run_to_end(followers, probes, on_step, export_kept)

        def finish() -> None:
            if export is not None:
                export(task)
            run.set_status("finished", config.steps, config.steps)

        with loop.parallel.gathered(task.model):
            process.on_main(finish)
        return result


class _Loop:
    """One pass from the last checkpoint to the end."""

    def __init__(
        self,
        task: Task,
        config: LoopConfig,
        run: RunDirectory,
        process: World,
        request: StopRequest,
        should_stop: Callable[[], bool] | None,
    ) -> None:
        self.task, self.config, self.run, self.world = task, config, run, process
        self.steps, self.request, self.should_stop = config.steps, request, should_stop
        self.failure: Exception | None = None
        self.stepper = TrainStep(task, config, process, self._asked_to_stop)
        self.parallel = self.stepper.parallel
        self.last: StepReport | None = None

    def _asked_to_stop(self) -> bool:
        """After a signal, by `should_stop`, or after a failure of this process."""
        if self.failure is not None:
            return True
        if self.request.by is None and self.should_stop is not None and self.should_stop():
            self.request.by = "the caller's request"
        return self.request.by is not None

    def _attempt(self, work: Callable[..., object], *arguments: Any) -> None:
        """Do what this process does while others go on.

        Where there are others, an error stops all of them after the next step: they would wait.
        """
        try:
            work(*arguments)
        except Exception as error:
            if self.world.size == 1:
                raise
            self.failure = self.failure or error

    def _raise_failure(self) -> None:
        """Raise on every process what went wrong on the first one, if anything did."""

        def failed() -> None:
            if self.failure is not None:
                raise self.failure

        self.world.on_main(failed)

    def run_to_end(
        self,
        followers: Sequence[ProgressBar | Tracking],
        probes: Sequence[Probe],
        on_step: Callable[[StepReport], None] | None,
        export_kept: Callable[[Task, int], None] | None,
    ) -> TrainingResult:
        """Take the remaining steps."""
        names = [probe.name for probe in probes]
        if "metrics" in names:
            raise InputError("a probe is called 'metrics', whose file belongs to the training")
        if len(set(names)) != len(names):
            raise InputError(f"two probes would write one file: they are called {sorted(names)}")
        self.probes = [(p, MetricsLog(self.run.path / f"{p.name}.jsonl")) for p in probes]
        self.logs = [self.run.metrics, *(log for _, log in self.probes)]
        own = () if on_step is None else (on_step,)
        self.listeners = [*(follower.step for follower in followers), *own]
        start = self.saved_step = self._resume()
        self.started, self.started_step = time.monotonic(), start
        self.status_due = self.started + STATUS_SECONDS
        self.save_due = self.started + self.config.checkpoint_seconds
        try:
            for follower in followers:
                self._attempt(follower.start, start, self.steps)
            for step in range(start + 1, self.steps + 1):
                values = self._take(step)
                if not values.finite:
                    self._diverge(step, values)
                self._attempt(self._report, step, values)
                # Before any checkpoint of this step: a resumed run finds every kept model there.
                if step in self.config.keep and export_kept is not None:
                    with self.parallel.gathered(self.task.model):
                        self.world.on_main(partial(export_kept, self.task, step))
                if values.stop and step < self.steps:
                    self._interrupt(step)
                self._attempt(self._save_when_due, step)
            self._save_for_all(self.steps)
        finally:
            for follower in followers:
                follower.stop()
            if self.world.main:
                for log in self.logs:
                    log.close()
        assert self.last is not None
        last = self.last
        return TrainingResult(self.run.path, self.steps, last.tokens, last.loss, last.metrics)

    def _resume(self) -> int:
        """Load the last whole checkpoint, bring the files in line with it; return its step."""
        found: list[Checkpoint] = []
        step, meta = self.world.on_main(lambda: self._prepare_files(found))
        if step > 0:
            # The writing process has read it already, to see whether it is whole.
            checkpoint = found[0] if found else self.run.checkpoints.load(step)
            tensors = self.parallel.load(checkpoint, self.task.model)
            unpack(tensors, self.task.model, self.stepper.optimiser)
            self.stepper.scaler.load_state_dict(meta.get("loss_scale", {}))
            self.last = StepReport(**meta["last"])
        return step

    def _prepare_files(self, found: list[Checkpoint]) -> tuple[int, dict[str, Any]]:
        """On the writing process: pick the checkpoint, cut the metrics, record the environment."""
        run, config = self.run, self.config
        checkpoint = run.checkpoints.latest()
        step, meta = (checkpoint.step, checkpoint.meta) if checkpoint else (0, {})
        run.checkpoints.set_aside_after(step)
        for log in self.logs:
            log.truncate_after(step)
        if checkpoint:
            found.append(checkpoint)
            if run.metrics.lines != meta["metrics_lines"]:
                warn(
                    f"warning: {run.metrics.path} holds {run.metrics.lines} lines up to step "
                    f"{step}, but {meta['metrics_lines']} were written; the rest is lost"
                )
        current = describe_environment(
            device=str(self.world.device.type),
            precision=config.precision,
            processes=self.world.size,
            compile=config.compile,
        )
        changed = record_environment(run.path / "environment.json", current, step)
        if changed:
            warn(
                f"warning: {run.path} resumes at step {step} in another environment "
                f"({'; '.join(changed)}); its digits may differ from those of a run never stopped"
            )
        run.set_status("running", step, self.steps)
        return step, meta

    def _take(self, step: int) -> StepValues:
        """One step, with those probes around it that are due."""
        with ExitStack() as stack:
            due: list[tuple[MetricsLog, Callable[[], Mapping[str, Any]]]] = []

            def enter() -> None:
                for probe, log in self.probes:
                    if probe.due(step, self.steps):
                        due.append((log, stack.enter_context(probe.around(self.task, step))))

            def read() -> None:
                for log, line in due:
                    log.append({"step": step, **line()})

            self._attempt(enter)
            values = self.stepper.step(step)
            if values.finite:
                self._attempt(read)
        return values

    def _report(self, step: int, values: StepValues) -> None:
        """Log a step and tell whoever listens."""
        seconds, per_step = time.monotonic() - self.started, self.task.tokens_per_step
        report = self.last = StepReport(
            step,
            self.steps,
            values.loss,
            values.gradient_norm,
            values.learning_rate,
            values.metrics,
            step * per_step,
            (step - self.started_step) * per_step / max(seconds, 1e-9),
            seconds,
        )
        if not self.world.main:
            return
        if step % self.config.log_every == 0 or step in (1, self.steps):
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
        for listen in self.listeners:
            listen(report)

    def _save_when_due(self, step: int) -> None:
        if self.parallel.due(lambda: time.monotonic() >= self.save_due):
            self._save(step)
        elif self.world.main and time.monotonic() >= self.status_due:
            self._write_status(step)

    def _save(self, step: int) -> None:
        """Write the checkpoint of `step`, unless its weights are not finite.

        Where processes hold parts, what is begun here is finished by `settle`.
        """
        if not self.parallel.writes or step == self.saved_step:
            return
        if not self.parallel.finite(self.task.model):
            return
        before = time.monotonic()
        self._attempt(self._flush_logs)
        if not self.parallel.due(lambda: self.failure is None):
            return
        assert self.last is not None
        # Without its clock times: checkpoints of equal runs are equal.
        last = {**asdict(self.last), "tokens_per_second": 0.0, "seconds": 0.0}
        meta = {"metrics_lines": self.run.metrics.lines, "last": last}
        if self.stepper.scaler.is_enabled():
            meta["loss_scale"] = self.stepper.scaler.state_dict()
        tensors = pack(self.task.model, self.stepper.optimiser)
        self.parallel.save(self.run.checkpoints, step, tensors, meta)
        self.saved_step = step
        if self.world.main:
            self._write_status(step)
        now, every = time.monotonic(), self.config.checkpoint_seconds
        self.save_due = now + (max(every, (now - before) / CHECKPOINT_SHARE) if every else 0.0)

    def _save_for_all(self, step: int) -> None:
        """Save, and raise on every process what the first one could not do."""
        self._attempt(self._save, step)
        self.parallel.settle()
        self._raise_failure()

    def _flush_logs(self) -> None:
        for log in self.logs:
            log.flush()

    def _write_status(self, step: int) -> None:
        self.run.set_status("running", step, self.steps)
        self.status_due = time.monotonic() + STATUS_SECONDS

    def _interrupt(self, step: int) -> None:
        """Save, say why and stop."""
        self._raise_failure()
        by = self.request.by or "another process of the group"
        message = f"stopped by {by} after step {step} of {self.steps}"
        self._save_for_all(step)
        self.world.on_main(lambda: self.run.set_status("interrupted", step, self.steps, message))
        raise Interrupted(f"{message}; rerun the command to resume from there")

    def _diverge(self, step: int, values: StepValues) -> None:
        """Save the state before the bad step, find where it began, say both and stop."""
        where = "a module not searched for (resume with parallel ddp to have it named)"
        self.stepper.undo_buffers()
        if self.parallel.searched:
            where = self.world.first_of(find_origin(self.stepper, step)) or (
                f"the gradient norm ({values.gradient_norm}), every loss and gradient being finite"
            )
            # The search went through the bad step once more.
            self.stepper.undo_buffers()
        if step > 1:
            self._save_for_all(step - 1)
        kept = self.world.on_main(self.run.checkpoints.last_path)
        error = DivergedError(step, where, str(kept) if kept else None)
        if self.world.main:
            self._flush_logs()
            more = {"where": where, "checkpoint": error.checkpoint}
            self.run.set_status("diverged", step, self.steps, str(error), **more)
        raise error

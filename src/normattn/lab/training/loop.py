"""The training loop: resume, step, record, checkpoint, stop, find where a step diverged."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from normattn.errors import DivergedError, Interrupted
from normattn.lab.runs import (
    Checkpoint,
    MetricsLog,
    RunDirectory,
    describe_environment,
    record_environment,
)
from normattn.lab.runs.environment import torch_threads
from normattn.lab.training.config import LoopConfig
from normattn.lab.training.distributed import World, process_group
from normattn.lab.training.progress import ProgressBar
from normattn.lab.training.state import pack, unpack
from normattn.lab.training.step import StepValues, TrainStep
from normattn.lab.training.task import Probe, StepReport, Task, TrainingResult, derive_seed
from normattn.lab.training.trackers import Tracking
from normattn.stopping import StopRequest
from normattn.terminal import warn

STATUS_SECONDS = 5.0
# Checkpoints take at most this share of the time: slow ones are written less often.
CHECKPOINT_SHARE = 0.05
_GRADIENT = "the gradient of"


def train(
    make_task: Callable[[World], Task],
    config: LoopConfig,
    run: RunDirectory,
    *,
    on_start: Callable[[], None] | None = None,
    on_step: Callable[[StepReport], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    probes: Sequence[Probe] = (),
    show_progress: bool = True,
    export: Callable[[Task], None] | None = None,
    export_kept: Callable[[Task, int], None] | None = None,
) -> TrainingResult:
    """Train to `config.steps` from the run's last checkpoint; return the final values.

    `make_task` builds the task on each process, after torch's generators are seeded; if it fails,
    nothing is written. On the main process, `on_start` runs once the run directory is locked,
    `export` once at the end, before the run is marked as finished, `export_kept` after each step of
    `config.keep`, `on_step` gets a report of each step, and `probes` measure chosen steps.
    Under torchrun every process calls `train`, and `should_stop` in each step.

    On CPU in fp32, with the same versions and thread count, a run that was stopped and resumed has
    bit-identical metrics to one that was not.

    Raises `Interrupted` after SIGINT, SIGTERM or `should_stop`, with the state saved;
    `DivergedError` if the loss or gradient norm is not finite; `InputError` if the directory is in
    use, has only damaged checkpoints, or cannot be written.
    """
    with ExitStack() as stack:
        world = stack.enter_context(process_group(config.device))
        stack.enter_context(torch_threads(config.threads))
        # The caller's random state is restored afterwards.
        cuda = [world.device] if world.device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        displays: list[ProgressBar | Tracking] = []
        if config.track is not None:
            track, every = config.track, config.log_every
            world.on_main(lambda: displays.append(Tracking(track, run, every)))
        request = stack.enter_context(StopRequest())
        torch.manual_seed(derive_seed(config.seed, "initialisation"))
        task = world.on_all(lambda: make_task(world))
        if world.main and show_progress:
            displays.append(ProgressBar())
        if not world.main:
            on_step, probes = None, ()
        loop = _Loop(task, config, run, world, request, should_stop)
        stack.callback(loop.stepper.close)

        def start() -> None:
            stack.enter_context(run.lock())
            if on_start is not None:
                on_start()

        # The model and its optimiser exist: bad settings leave no run behind.
        world.on_main(start)
        result = loop.run_to_end(displays, probes, on_step, export_kept)

        def finish() -> None:
            if export is not None:
                export(task)
            run.set_status("finished", config.steps, config.steps)

        with loop.parallel.full_parameters(task.model):
            world.on_main(finish)
        return result


class _Loop:
    """The state of a training between its last checkpoint and its end."""

    def __init__(
        self,
        task: Task,
        config: LoopConfig,
        run: RunDirectory,
        world: World,
        request: StopRequest,
        should_stop: Callable[[], bool] | None,
    ) -> None:
        self.task, self.config, self.run, self.world = task, config, run, world
        self.steps, self.request, self.should_stop = config.steps, request, should_stop
        self.failure: Exception | None = None
        self.stepper = TrainStep(task, config, world, self._stop_asked)
        self.parallel = self.stepper.parallel
        self.last: StepReport | None = None

    def _stop_asked(self) -> bool:
        """Return whether to stop: after a signal, by `should_stop`, or after a failure."""
        if self.failure is not None:
            return True
        if self.request.by is None and self.should_stop is not None and self.should_stop():
            self.request.by = "the caller's request"
        return self.request.by is not None

    def _attempt(self, work: Callable[..., object], *arguments: Any) -> None:
        """Run `work` on this process alone.

        With several processes, an error is raised on all of them after the next step. Raised at
        once, it would leave the others waiting.
        """
        try:
            work(*arguments)
        except Exception as error:
            if self.world.size == 1:
                raise
            self.failure = self.failure or error

    def run_to_end(
        self,
        displays: Sequence[ProgressBar | Tracking],
        probes: Sequence[Probe],
        on_step: Callable[[StepReport], None] | None,
        export_kept: Callable[[Task, int], None] | None,
    ) -> TrainingResult:
        self.probes = [(p, MetricsLog(self.run.path / f"{p.name}.jsonl")) for p in probes]
        self.logs = [self.run.metrics, *(log for _, log in self.probes)]
        callbacks = () if on_step is None else (on_step,)
        self.listeners = [*(display.step for display in displays), *callbacks]
        start = self.saved_step = self._resume()
        self.started, self.started_step = time.monotonic(), start
        self.status_due = self.started + STATUS_SECONDS
        self.save_due = self.started + self.config.checkpoint_seconds
        try:
            for display in displays:
                self._attempt(display.start, start, self.steps)
            for step in range(start + 1, self.steps + 1):
                values = self._step(step)
                if not values.finite:
                    self._diverge(step, values)
                self._attempt(self._report, step, values)
                # Export before this step's checkpoint, so that a resumed run has every kept model.
                if step in self.config.keep and export_kept is not None:
                    with self.parallel.full_parameters(self.task.model):
                        self.world.on_main(partial(export_kept, self.task, step))
                if values.stop and step < self.steps:
                    self._save_and_wait(step)
                    by = self.request.by or "another process of the group"
                    message = f"stopped by {by} after step {step} of {self.steps}"
                    status = partial(self.run.set_status, "interrupted", step, self.steps, message)
                    self.world.on_main(status)
                    raise Interrupted(f"{message}; rerun the command to resume from there")
                if self.parallel.decide(lambda: time.monotonic() >= self.save_due):
                    self._attempt(self._save, step)
                elif self.world.main and time.monotonic() >= self.status_due:
                    self._attempt(self._write_status, step)
            self._save_and_wait(self.steps)
        finally:
            for display in displays:
                display.stop()
            if self.world.main:
                for log in self.logs:
                    log.close()
        assert self.last is not None
        last = self.last
        return TrainingResult(self.run.path, self.steps, last.tokens, last.loss, last.metrics)

    def _resume(self) -> int:
        """Load the last complete checkpoint, truncate the logs to it; return its step."""
        run, loaded = self.run, list[Checkpoint]()

        def prepare_files() -> tuple[int, dict[str, Any]]:
            checkpoint = run.checkpoints.latest()
            step, meta = (checkpoint.step, checkpoint.meta) if checkpoint else (0, {})
            run.checkpoints.set_aside_after(step)
            for log in self.logs:
                log.truncate_after(step)
            if checkpoint:
                loaded.append(checkpoint)
            current = describe_environment(
                device=str(self.world.device.type),
                precision=self.config.precision,
                processes=self.world.size,
                compile=self.config.compile,
            )
            if changed := record_environment(run.path / "environment.json", current, step):
                warn(
                    f"warning: {run.path} resumes at step {step} in another environment "
                    f"({'; '.join(changed)}); its digits may differ from those of a run never "
                    "stopped"
                )
            run.set_status("running", step, self.steps)
            return step, meta

        step, meta = self.world.on_main(prepare_files)
        if step > 0:
            # The main process has loaded it already, to verify it.
            checkpoint = loaded[0] if loaded else run.checkpoints.load(step)
            tensors = self.parallel.load(checkpoint, self.task.model)
            unpack(tensors, self.task.model, self.stepper.optimiser)
            self.stepper.scaler.load_state_dict(meta.get("loss_scale", {}))
            self.last = StepReport(**meta["last"])
        return step

    def _step(self, step: int) -> StepValues:
        with ExitStack() as stack:
            due: list[tuple[MetricsLog, Callable[[], Mapping[str, Any]]]] = []

            def enter_probes() -> None:
                for probe, log in self.probes:
                    if probe.due(step, self.steps):
                        due.append((log, stack.enter_context(probe.around(self.task, step))))

            def write_lines() -> None:
                for log, line in due:
                    log.append({"step": step, **line()})

            self._attempt(enter_probes)
            values = self.stepper.step(step)
            if values.finite:
                self._attempt(write_lines)
        return values

    def _report(self, step: int, values: StepValues) -> None:
        seconds, per_step = time.monotonic() - self.started, self.task.tokens_per_step
        rate = (step - self.started_step) * per_step / max(seconds, 1e-9)
        report = self.last = StepReport(
            *(step, self.steps, values.loss, values.gradient_norm, values.learning_rate),
            *(values.metrics, step * per_step, rate, seconds),
        )
        if not self.world.main:
            return
        if step % self.config.log_every == 0 or step in (1, self.steps):
            line = {"step": step, "loss": values.loss, **values.metrics}
            rates = {"gradient_norm": values.gradient_norm, "learning_rate": values.learning_rate}
            self.run.metrics.append({**line, **rates, "tokens": report.tokens})
        for listener in self.listeners:
            listener(report)

    def _save(self, step: int) -> None:
        """Write, or if sharded start to write, the checkpoint of `step` if weights are finite."""
        if not self.parallel.writes or step == self.saved_step:
            return
        if not self.parallel.is_finite(self.task.model):
            return
        before = time.monotonic()
        self._attempt(self._flush_logs)
        if not self.parallel.decide(lambda: self.failure is None):
            return
        assert self.last is not None
        # Leave out clock times, so that equal runs have equal checkpoints.
        last = {**asdict(self.last), "tokens_per_second": 0.0, "seconds": 0.0}
        meta: dict[str, Any] = {"last": last}
        if self.stepper.scaler.is_enabled():
            meta["loss_scale"] = self.stepper.scaler.state_dict()
        tensors = pack(self.task.model, self.stepper.optimiser)
        self.parallel.save(self.run.checkpoints, step, tensors, meta)
        self.saved_step = step
        if self.world.main:
            self._write_status(step)
        now, period = time.monotonic(), self.config.checkpoint_seconds
        self.save_due = now + (max(period, (now - before) / CHECKPOINT_SHARE) if period else 0.0)

    def _save_and_wait(self, step: int) -> None:
        """Save, wait, and raise the main process's failure, if any, on every process."""
        self._attempt(self._save, step)
        self.parallel.wait()

        def raise_failure() -> None:
            if self.failure is not None:
                raise self.failure

        self.world.on_main(raise_failure)

    def _flush_logs(self) -> None:
        for log in self.logs:
            log.flush()

    def _write_status(self, step: int) -> None:
        self.run.set_status("running", step, self.steps)
        self.status_due = time.monotonic() + STATUS_SECONDS

    def _diverge(self, step: int, values: StepValues) -> None:
        """Save the state before this step, find where it diverged, and raise `DivergedError`."""
        where = "a module not searched for (resume with parallel ddp to have it named)"
        self.stepper.restore_buffers()
        if not self.parallel.sharded:  # The forward pass can be repeated outside its wrapper.
            origin, first = find_origin(self.stepper, step), self.world.first_not_none
            # The backward pass of BatchNorm spreads what is not finite to all processes.
            in_forward = None if (origin or "").startswith(_GRADIENT) else origin
            norm = f"the gradient norm ({values.gradient_norm}), all losses and gradients finite"
            where = first(in_forward) or first(origin) or norm
            # The search has repeated the forward pass.
            self.stepper.restore_buffers()
        if step > 1:
            self._save_and_wait(step - 1)
        last = self.world.on_main(self.run.checkpoints.last_path)
        error = DivergedError(step, where, str(last) if last else None)
        if self.world.main:
            self._flush_logs()
            details = {"where": where, "checkpoint": error.checkpoint}
            self.run.set_status("diverged", step, self.steps, str(error), **details)
        raise error


def find_origin(stepper: TrainStep, step: int) -> str | None:
    """Repeat the forward and backward passes of `step`; return where values stop being finite.

    The origin is the first module whose output is not finite, such as `blocks.1.feed_forward.down`
    (with its parameter if that was not finite before), or the loss, or the first gradient. None if
    all values of this rank are finite. Each rank repeats all of it: BatchNorm communicates.
    """
    origins: list[str] = []

    def check_output(name: str, module: nn.Module, _inputs: Any, output: Any) -> None:
        if not _finite(output):
            bad = [key for key, value in module.named_parameters() if not _finite(value)]
            before = f" (its parameter {bad[0]} was not finite before this step)" if bad else ""
            origins.append(name + before)

    def check_gradient(name: str, parameter: Any) -> None:
        if not _finite(parameter.grad):
            origins.append(f"{_GRADIENT} {name}")

    model = stepper.task.model
    stepper.optimiser.zero_grad()
    with ExitStack() as stack:
        for name, module in model.named_modules():
            hook = partial(check_output, name or "the model")
            stack.callback(module.register_forward_hook(hook).remove)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                add_hook: Any = parameter.register_post_accumulate_grad_hook
                stack.callback(add_hook(partial(check_gradient, name)).remove)
        for micro, batch in enumerate(stepper.batches(step)):
            stepper.seed(step, micro)
            with stepper.autocast():
                loss, _ = stepper.task.loss(batch)
            if not origins and not bool(torch.isfinite(loss)):
                origins.append("the loss, every module's output being finite")
            loss.backward()  # type: ignore[no-untyped-call]
    return origins[0] if origins else None


def _finite(values: Any) -> bool:
    tensors = (leaf.detach() for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return all(bool(torch.isfinite(x).all()) for x in tensors if x.is_floating_point())

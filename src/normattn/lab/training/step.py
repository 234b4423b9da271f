"""One optimiser step: forward and backward over the micro-batches, clipping, update."""

from __future__ import annotations

import gc
import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from normattn.errors import InputError
from normattn.lab.training.config import LoopConfig, lr_multiplier
from normattn.lab.training.distributed import Parallel, World
from normattn.lab.training.optim import UnitWeights, make_optimiser
from normattn.lab.training.qk_clip import QKClip
from normattn.lab.training.sharding import full_tensor
from normattn.lab.training.state import persistent_buffers
from normattn.lab.training.task import Task, derive_seed
from normattn.models.transformer import set_activation_checkpointing

LARGEST_LOGIT = "largest_logit"
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class StepValues:
    """Means of a step over the global batch; `stop` if any rank was asked to stop."""

    loss: float
    gradient_norm: float
    learning_rate: float
    metrics: Mapping[str, float]
    stop: bool

    @property
    def finite(self) -> bool:
        """Whether the loss and the gradient norm are finite numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


class Objective(nn.Module):
    """A task's loss as an `nn.Module`, to be compiled and distributed."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.model = task.model
        self._loss = task.loss

    def forward(self, batch: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the task's loss and metrics."""
        return self._loss(batch)


class TrainStep:
    """Takes optimiser steps of a task; skips the update if the loss or gradients are not finite.

    Random numbers of step t are drawn from (seed, t, shard), so that no generator state is saved.
    `stop_asked` is called in each step, and its result is shared with the other ranks.
    """

    def __init__(
        self, task: Task, config: LoopConfig, world: World, stop_asked: Callable[[], bool]
    ) -> None:
        self.task, self.config, self.world = task, config, world
        self.parallel = Parallel(world)
        if config.parallel == "fsdp" and world.size > 1:
            # torch's FSDP2 takes a second to import.
            from normattn.lab.training.fsdp import Sharded

            self.parallel = Sharded(world, config.precision)
        if config.activation_checkpointing:
            set_activation_checkpointing(task.model)
        # Wrap before making the optimiser, because sharding replaces parameters.
        objective = self.parallel.wrap(Objective(task))
        self.optimiser = make_optimiser(task.model, config.optimiser)
        fp16 = config.precision == "fp16"
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=fp16)
        self._clip = None if config.qk_clip is None else QKClip(task.model, config.qk_clip, world)
        self._unit_weights = UnitWeights(task.model) if config.unit_weights else None
        if self._unit_weights is not None:
            self._unit_weights.normalise()
        self._stop_asked = stop_asked
        self._buffers = list(persistent_buffers(task.model).values())
        self._saved_buffers: list[Tensor] = []
        self._parameters = [p for g in self.optimiser.param_groups for p in g["params"]]
        self._wrapped = objective
        compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
        if config.compile and world.device.type == "cpu" and shutil.which(compiler) is None:
            raise InputError(
                f"compile is on, but the C++ compiler {compiler!r} that torch.compile needs is not "
                "installed; install it, name another one in CXX, or set compile to false"
            )
        self._objective = torch.compile(objective, dynamic=False) if config.compile else objective
        self._prefetched: tuple[int, list[Any]] = (0, [])

    def close(self) -> None:
        """Drop the wrappers: gloo may hang if its group is destroyed before they are."""
        self._wrapped = self._objective = Objective(self.task)
        if self.world.size > 1:
            gc.collect()

    def seed(self, step: int, micro: int) -> None:
        """Seed torch's generators for one micro-batch."""
        shard = self.world.rank * self.config.accumulate + micro
        seed = derive_seed(self.config.seed, step, shard)
        # torch.manual_seed formats a stack trace for every missing device type: 0.3 ms a call.
        torch.default_generator.manual_seed(seed)
        if self.world.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context of forward passes."""
        dtype = _AUTOCAST.get(self.config.precision)
        return nullcontext() if dtype is None else torch.autocast(self.world.device.type, dtype)

    def batches(self, step: int) -> list[Any]:
        """Return this rank's micro-batches of `step` on the device."""
        if self._prefetched[0] != step:
            self._prefetched = (step, self._fetch(step))
        return self._prefetched[1]

    def step(self, step: int) -> StepValues:
        """Take optimiser step `step` (from 1), unless its loss or gradient norm is not finite.

        If only fp16's scaled gradients overflow, it is repeated with half the scale.
        """
        self._saved_buffers = [buffer.clone() for buffer in self._buffers]
        values, gradients = self._evaluate(step)
        while self.scaler.is_enabled() and not values.finite and math.isfinite(values.loss):
            scale = self.scaler.get_scale()
            self.scaler.update()
            if not 1.0 <= self.scaler.get_scale() < scale:
                break
            self.restore_buffers()
            values, gradients = self._evaluate(step)
        if not values.finite:
            return values
        clip, norm = self.config.clip, values.gradient_norm
        if clip is not None and norm > clip:
            torch._foreach_mul_(gradients, clip / (norm + 1e-6))
        self.optimiser.step(values.learning_rate)
        if self._unit_weights is not None:
            self._unit_weights.normalise()
        if self.scaler.is_enabled():
            self.scaler.update()
        if self._clip is None:
            return values
        return replace(values, metrics={**values.metrics, LARGEST_LOGIT: self._clip.clip()})

    def _evaluate(self, step: int) -> tuple[StepValues, list[Tensor]]:
        """Return the values of a step, and its unscaled, averaged gradients."""
        self.optimiser.zero_grad()
        means: dict[str, Tensor] = {}
        batches = self.batches(step)
        for micro, batch in enumerate(batches):
            self.seed(step, micro)
            last = micro == len(batches) - 1
            with nullcontext() if last else self.parallel.no_sync(self._wrapped):
                recording = nullcontext() if self._clip is None else self._clip.recording()
                with self.autocast(), recording:
                    loss, metrics = self._objective(batch)
                scaled = loss / len(batches) if len(batches) > 1 else loss
                self.scaler.scale(scaled).backward()
            for name, value in {"loss": loss, **metrics}.items():
                mean = value.detach() / len(batches) if len(batches) > 1 else value.detach()
                means[name] = means[name] + mean if name in means else mean
        self.parallel.average_unwrapped()
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        for member, _ in self.optimiser.members:
            self.scaler.unscale_(member)
        norm = full_tensor(torch.nn.utils.get_total_norm(gradients))
        names = list(means)
        stop = torch.full((), float(self._stop_asked()), device=norm.device)
        averaged = self.world.mean(torch.stack([stop, *(means[name].float() for name in names)]))
        if norm.device.type != "cpu" and step < self.config.steps:
            # The device is still computing: fetch the next batch before waiting for it.
            self._prefetched = (step + 1, self._fetch(step + 1))
        # Transfer all values of the step from the device at once.
        gradient_norm, stopped, *numbers = torch.cat([norm.float().view(1), averaged]).tolist()
        metrics = dict(zip(names, numbers, strict=True))
        config = self.config
        rate = config.optimiser.lr * lr_multiplier(config.schedule, step, config.steps)
        loss = metrics.pop("loss")
        return StepValues(loss, gradient_norm, rate, metrics, stopped > 0.0), gradients

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Undo the changes of the last step's forward passes to buffers (running statistics)."""
        for buffer, saved in zip(self._buffers, self._saved_buffers, strict=True):
            buffer.copy_(saved)

    def _fetch(self, step: int) -> list[Any]:
        shards = self.world.size * self.config.accumulate
        device, count = self.world.device, self.config.accumulate
        first = self.world.rank * count
        batches = [self.task.batch(step, n, shards) for n in range(first, first + count)]
        if device.type == "cpu":
            return batches
        moved: list[Any] = tree_map(lambda x: x.pin_memory().to(device, non_blocking=True), batches)
        return moved

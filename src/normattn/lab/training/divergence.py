"""Find where a NaN or infinity began, by repeating the step with hooks on every module."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from normattn.lab.training.step import TrainStep

GRADIENT = "the gradient of"


def find_origin(stepper: TrainStep, step: int) -> str | None:
    """Repeat the forward and backward passes of `step`; return where values stop being finite.

    The origin is the first module whose output is not finite, such as `blocks.1.feed_forward.down`
    (with its parameter if that was not finite before), or the loss, or the first gradient. None if
    all values of this rank are finite. Each rank repeats all of it: BatchNorm communicates.
    """
    stepper.optimiser.zero_grad()
    origins: list[str] = []
    for micro, batch in enumerate(stepper.batches(step)):
        stepper.seed(step, micro)
        with ExitStack() as stack:
            _add_hooks(stepper.task.model, origins, stack)
            with stepper.autocast():
                loss, _ = stepper.task.loss(batch)
            if not origins and not bool(torch.isfinite(loss)):
                origins.append("the loss, every module's output being finite")
            loss.backward()  # type: ignore[no-untyped-call]
    return origins[0] if origins else None


def _add_hooks(model: nn.Module, origins: list[str], stack: ExitStack) -> None:
    def check_output(name: str, module: nn.Module, _inputs: Any, output: Any) -> None:
        if not _finite(output):
            bad = [key for key, value in module.named_parameters() if not _finite(value)]
            before = f" (its parameter {bad[0]} was not finite before this step)" if bad else ""
            origins.append(name + before)

    def check_gradient(name: str, parameter: Tensor) -> None:
        if not _finite(parameter.grad):
            origins.append(f"{GRADIENT} {name}")

    for name, module in model.named_modules():
        handle = module.register_forward_hook(partial(check_output, name or "the model"))
        stack.callback(handle.remove)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            hook = partial(check_gradient, name)
            handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            stack.callback(handle.remove)


def _finite(values: Any) -> bool:
    tensors = (leaf.detach() for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return all(bool(torch.isfinite(x).all()) for x in tensors if x.is_floating_point())

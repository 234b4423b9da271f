"""Where a NaN or an infinity began: the same step once more, watched module by module."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from normattn.lab.training.step import TrainStep


def find_origin(stepper: TrainStep, step: int) -> str | None:
    """Repeat the forward and backward passes of `step` and name where it stops being finite.

    The name is that of the module whose output is first not finite, as in
    `blocks.1.feed_forward.down` (with its parameter, when that was not finite before), or of the
    loss itself, or of the first gradient on the way back. None when this rank's part is finite.
    """
    stepper.optimiser.zero_grad()
    for micro, batch in enumerate(stepper.batches(step)):
        stepper.seed(step, micro)
        origins: list[str] = []
        with ExitStack() as stack:
            _watch(stepper.task.model, origins, stack)
            with stepper.autocast():
                loss, _ = stepper.task.loss(batch)
            if not origins and not bool(torch.isfinite(loss)):
                origins.append("the loss, every module's output being finite")
            if not origins:
                loss.backward()  # type: ignore[no-untyped-call]
        if origins:
            return origins[0]
    return None


def _watch(model: nn.Module, origins: list[str], stack: ExitStack) -> None:
    """Add modules and gradients that are not finite to `origins`, in the order of their making."""

    def see_output(name: str, module: nn.Module, _inputs: Any, output: Any) -> None:
        if not _finite(output):
            bad = [key for key, value in module.named_parameters() if not _finite(value)]
            before = f" (its parameter {bad[0]} was not finite before this step)" if bad else ""
            origins.append(name + before)

    def see_gradient(name: str, parameter: Tensor) -> None:
        if not _finite(parameter.grad):
            origins.append(f"the gradient of {name}")

    for name, module in model.named_modules():
        handle = module.register_forward_hook(partial(see_output, name or "the model"))
        stack.callback(handle.remove)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            hook = partial(see_gradient, name)
            handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            stack.callback(handle.remove)


def _finite(values: Any) -> bool:
    """Whether all tensors in `values`, through tuples, lists and dictionaries, are finite."""
    tensors = (leaf.detach() for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return all(bool(torch.isfinite(x).all()) for x in tensors if x.is_floating_point())

"""Where a NaN or an infinity began: the same step once more, watched module by module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normattn.lab.training.step import TrainStep


def find_origin(stepper: TrainStep, step: int) -> str | None:
    """Repeat the forward and backward passes of `step` and name where it stops being finite.

    The name is that of the module whose output is first not finite, as in
    `blocks.1.feed_forward.down` (with its parameter, when that was not finite before), or of the
    loss itself, or of the first gradient on the way back. None when this rank's part is finite.
    """
    model = stepper.task.model
    stepper.optimiser.zero_grad()
    for micro, batch in enumerate(stepper.batches(step)):
        stepper.seed(step, micro)
        origins: list[str] = []
        with _watch_outputs(model, origins.append), _watch_gradients(model, origins.append):
            with stepper.autocast():
                loss, _ = stepper.task.loss(batch)
            if not origins and not bool(torch.isfinite(loss)):
                origins.append("the loss, every module's output being finite")
            if not origins:
                loss.backward()  # type: ignore[no-untyped-call]
        if origins:
            return origins[0]
    return None


@contextmanager
def _watch_outputs(model: nn.Module, report: Callable[[str], None]) -> Iterator[None]:
    """Call `report` for each module whose output is not finite, innermost and earliest first."""

    def hook_for(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, _inputs: Any, output: Any) -> None:
            if not all(_finite(tensor) for tensor in _tensors(output)):
                report(name + _bad_parameter(module))

        return hook

    handles = [
        module.register_forward_hook(hook_for(name or "the model"))
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _watch_gradients(model: nn.Module, report: Callable[[str], None]) -> Iterator[None]:
    """Call `report` for each gradient that is not finite, in the order in which they appear."""

    def hook_for(name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if parameter.grad is not None and not _finite(parameter.grad):
                report(f"the gradient of {name}")

        return hook

    handles = [
        parameter.register_post_accumulate_grad_hook(hook_for(name))  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _bad_parameter(module: nn.Module) -> str:
    for name, parameter in module.named_parameters():
        if not _finite(parameter):
            return f" (its parameter {name} was not finite before this step)"
    return ""


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor.detach()).all())


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in a module's output, through tuples, lists and dictionaries."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _tensors(value)

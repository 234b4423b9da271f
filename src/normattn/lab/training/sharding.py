"""Tensors of which every process holds some rows (FSDP2's DTensors), whole or in part.

Other tensors go through unchanged, so that an optimiser needs no second path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, on every process; all of them must ask for it together."""
    parts: Any = tensor
    full: Tensor = parts.full_tensor() if hasattr(parts, "full_tensor") else tensor
    return full


def held_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """The rows of a tensor that this process holds, and the number of the first one."""
    parts: Any = tensor
    if not hasattr(parts, "to_local"):
        return tensor, 0
    share = -(-len(tensor) // parts.device_mesh.size())
    return parts.to_local(), min(parts.device_mesh.get_local_rank() * share, len(tensor))


@contextmanager
def replaced(
    model: nn.Module, made: Callable[[nn.Parameter], Tensor]
) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
    """In place of each divided parameter what `made` gives of it; by the divided one, once each."""
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and hasattr(parameter, "full_tensor")
    ]
    found: dict[nn.Parameter, nn.Parameter] = {}
    for module, name, parameter in places:
        if parameter not in found:
            found[parameter] = nn.Parameter(made(parameter), parameter.requires_grad)
        module._parameters[name] = found[parameter]
    try:
        yield found
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter

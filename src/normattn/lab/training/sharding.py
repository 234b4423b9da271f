"""Full and local views of FSDP2's DTensors, whose rows are divided among processes.

Ordinary tensors pass through unchanged, so that optimisers need no second path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor. All processes must call this together."""
    sharded: Any = tensor
    full: Tensor = sharded.full_tensor() if hasattr(sharded, "full_tensor") else tensor
    return full


def local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the rows that this process holds, and the index of the first one."""
    sharded: Any = tensor
    if not hasattr(sharded, "to_local"):
        return tensor, 0
    rows = -(-len(tensor) // sharded.device_mesh.size())
    return sharded.to_local(), min(sharded.device_mesh.get_local_rank() * rows, len(tensor))


@contextmanager
def replace_sharded_parameters(
    model: nn.Module, make: Callable[[nn.Parameter], Tensor]
) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
    """Inside, put `make(parameter)` in place of each sharded parameter; yields the mapping."""
    sharded = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and hasattr(parameter, "full_tensor")
    ]
    replacements: dict[nn.Parameter, nn.Parameter] = {}
    for module, name, parameter in sharded:
        if parameter not in replacements:
            replacements[parameter] = nn.Parameter(make(parameter), parameter.requires_grad)
        module._parameters[name] = replacements[parameter]
    try:
        yield replacements
    finally:
        for module, name, parameter in sharded:
            module._parameters[name] = parameter

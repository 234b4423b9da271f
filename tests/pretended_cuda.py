"""CPU tensors that pretend to be on a CUDA device, to find operations that mix devices.

`Tensor.device` of a pretended tensor is cuda:0, factories with a CUDA device make pretended ones,
and an operation on pretended and other tensors raises an error, as it would on a GPU. Numbers are
computed on the CPU. A backward pass is not covered: it runs without the function mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

Module = TypeVar("Module", bound=nn.Module)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
_STORAGES: dict[int, Any] = {}
_MOVES = ("to", "cpu", "cuda")
_LIKE = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "new_tensor")


def pretend(x: Tensor) -> Tensor:
    """The tensor, on the pretended device from now on, with all its views."""
    with torch._C.DisableTorchFunction():
        storage = x.untyped_storage()
        _STORAGES[storage._cdata] = storage
    return x


def moved(module: Module) -> Module:
    """The module with its parameters and buffers on the pretended device."""
    for x in (*module.parameters(), *module.buffers()):
        pretend(x)
    return module


def pretended(x: Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return x.untyped_storage()._cdata in _STORAGES


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuse mixed operations; what is computed from pretended tensors is pretended."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(func)
        tensors = _tensors((args, kwargs))
        there = any(map(pretended, tensors))
        # Copies may cross devices; an index and a number may be on the CPU.
        free = name.startswith(("aten.copy_", "aten._to_copy", "aten.index"))
        here = [x for x in tensors if not pretended(x) and x.dim()]
        if there and here and not free:
            raise RuntimeError(f"{name} mixes devices: {[tuple(x.shape) for x in here]} on the CPU")
        out = func(*args, **kwargs)
        if there and not name.startswith("aten.copy_"):
            for x in _tensors(out):
                pretend(x)
        return out


class _Functions(TorchFunctionMode):
    """Answer questions about devices, and make and move tensors as they ask."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if func == torch.Tensor.device.__get__:
            return CUDA if pretended(args[0]) else func(*args)
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return pretended(args[0])
        device = _asked(name, args, kwargs) if name in _MOVES else kwargs.get("device")
        if device is None:
            out = func(*args, **kwargs)
            return pretend(out) if name in _LIKE and pretended(args[0]) else out
        there = torch.device(device).type == "cuda"
        if name in _MOVES and pretended(args[0]) != there:
            with _disable_current_modes():
                args = (args[0].detach().clone(), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = CPU
        args = [
            CPU if isinstance(x, torch.device) or (isinstance(x, str) and name == "to") else x
            for x in args
        ]
        out = args[0] if name == "cuda" else func(*args, **kwargs)
        return pretend(out) if there else out


def _asked(name: str, args: Any, kwargs: Any) -> Any:
    """The device that `x.to(…)`, `x.cpu()` or `x.cuda()` asks for, or None."""
    if name != "to":
        return name
    for x in (*args[1:], kwargs.get("device")):
        if isinstance(x, Tensor):
            return CUDA if pretended(x) else CPU
        if isinstance(x, torch.device | str):
            return x
    return None


@contextmanager
def pretended_cuda() -> Iterator[None]:
    """Inside, pretended tensors are on cuda:0."""
    with _Operations(), _Functions():  # type: ignore[no-untyped-call]
        yield

"""Whose choices are made: a CPU's or a GPU's. A plan asks for a GPU's where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_AS_ON_GPU: ContextVar[bool] = ContextVar("choices of a GPU", default=False)


def on_cpu(x: Tensor) -> bool:
    """Whether to choose for `x` what is best on a CPU."""
    # A compiler does not trace a context variable; nobody plans what is compiled.
    asked = not torch.compiler.is_compiling() and _AS_ON_GPU.get()
    return x.device.type == "cpu" and not asked


@contextmanager
def as_on_gpu(asked: bool = True) -> Iterator[None]:
    """`on_cpu` is false inside, if `asked`: for tensors without numbers, which stand for others."""
    before = _AS_ON_GPU.set(_AS_ON_GPU.get() or asked)
    try:
        yield
    finally:
        _AS_ON_GPU.reset(before)

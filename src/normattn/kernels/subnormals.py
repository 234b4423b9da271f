"""Numbers too small to be normal count as 0 while a kernel computes.

A weight of exp(−90) is such a number in float32, and a bias that falls with the distance makes very
many of them. Products of them are slow on an Intel core: ALiBi took three to four times as long
(development/log.md, 2026-11-23). What is lost is below 2^−126 (float32) of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_LEAST, _ONE = 5e-324, 1.0


def flushes() -> bool:
    """Whether this thread takes subnormal numbers for 0."""
    return _LEAST * _ONE == 0.0


def flushing(compute: Callable[P, R]) -> Callable[P, R]:
    """Decorator: subnormal numbers are 0 inside, and again what they were outside.

    It holds for the thread that computes; further threads of torch's keep their own way.
    """

    @wraps(compute)
    def flushed(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or flushes() or not torch.set_flush_denormal(True):
            return compute(*args, **kwargs)
        try:
            return compute(*args, **kwargs)
        finally:
            torch.set_flush_denormal(False)

    return flushed

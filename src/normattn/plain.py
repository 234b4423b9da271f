"""When to compute by torch's own operations only, instead of functions with backwards by hand.

A compiler fuses plain operations better than it takes apart hand-written ones; torch.func (vmap,
grad, jvp) and forward-mode derivatives cannot look into those at all; and `backend="reference"`
promises every derivative there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch.autograd import forward_ad

FAKE = torch._C._TorchDispatchModeKey.FAKE
"""The kind of mode in which tensors have shapes and no numbers (`FakeTensorMode`)."""
_ASKED: ContextVar[bool] = ContextVar("plain operations", default=False)


def traced() -> bool:
    """Whether tensors may hold no numbers: a compiler or `FakeTensorMode` is at work."""
    return torch.compiler.is_compiling() or torch._C._get_dispatch_mode(FAKE) is not None


def keepable() -> bool:
    """Whether a tensor that is made now is an ordinary one, which later calls may use as well."""
    if traced():
        return False
    return torch._C._functorch.maybe_current_level() is None


def transformed() -> bool:
    """Whether torch.func or forward mode is at work, which sees into no hand-written backward."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def plain() -> bool:
    """Whether every operation is to be one of torch's own."""
    return torch.compiler.is_compiling() or _ASKED.get() or transformed()


@contextmanager
def plain_operations(asked: bool = True) -> Iterator[None]:
    """`plain()` is true inside, if `asked`."""
    if not asked or torch.compiler.is_compiling():
        yield
        return
    before = _ASKED.set(True)
    try:
        yield
    finally:
        _ASKED.reset(before)

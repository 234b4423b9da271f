"""When to use torch's own operations instead of our autograd functions with hand-written backwards.

A compiler fuses them better, and torch.func (vmap, grad, jvp) and forward-mode derivatives support
nothing else. `backend="reference"` promises every derivative.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch.autograd import forward_ad

FAKE = torch._C._TorchDispatchModeKey.FAKE
"""The dispatch mode of `FakeTensorMode`, whose tensors have shapes but no values."""
_PLAIN_OPS: ContextVar[bool] = ContextVar("plain operations", default=False)


def traced() -> bool:
    """Whether tensors may have no values: inside a compiler or `FakeTensorMode`."""
    return torch.compiler.is_compiling() or torch._C._get_dispatch_mode(FAKE) is not None


def cacheable() -> bool:
    """Whether a tensor made now can be cached for later calls: no tracer and no fake tensor."""
    if traced():
        return False
    return torch._C._functorch.maybe_current_level() is None


def transformed() -> bool:
    """Whether torch.func or forward mode is active, which cannot use a hand-written backward."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def use_plain_ops() -> bool:
    """Whether to compute with torch's own operations only."""
    return torch.compiler.is_compiling() or _PLAIN_OPS.get() or transformed()


@contextmanager
def plain_operations(enabled: bool = True) -> Iterator[None]:
    """Make `use_plain_ops()` true inside, if `enabled`."""
    if not enabled or torch.compiler.is_compiling():
        yield
        return
    token = _PLAIN_OPS.set(True)
    try:
        yield
    finally:
        _PLAIN_OPS.reset(token)

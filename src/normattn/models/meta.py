"""Models without memory: built for their names and shapes, on torch's meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@contextmanager
def on_meta() -> Iterator[None]:
    """Modules made inside have parameters with shapes and dtypes, but take no memory."""
    with torch.device("meta"), Undrawn():
        yield


class Undrawn(TorchFunctionMode):
    """Normal numbers are not drawn: torch would load its compiler for them, which takes seconds."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in (Tensor.normal_, nn.init.normal_):
            return args[0] if args else given["tensor"]
        return func(*args, **given)

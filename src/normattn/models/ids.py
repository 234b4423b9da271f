"""Token ids as every model takes them, checked before anything reads their shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normattn.errors import InputError


def checked_ids(ids: Any, name: str = "ids") -> Tensor:
    """`ids` themselves; `InputError` unless they are a dense matrix (B, T) of int64 or int32."""
    if not isinstance(ids, Tensor):
        raise InputError(
            f"{name} must be a tensor of whole numbers (B, T), but it is a {type(ids).__name__}"
        )
    whole = ids.dtype in (torch.int64, torch.int32)
    if ids.dim() != 2 or not whole or ids.layout is not torch.strided:
        kind = "" if ids.layout is torch.strided else " sparse"
        raise InputError(
            f"{name} must be whole numbers (int64 or int32) of shape (B, T), but they are{kind} "
            f"{ids.dtype} of {tuple(ids.shape)}"
        )
    return ids

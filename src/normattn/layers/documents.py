"""Number the documents of packed rows, from the formats of data loaders.

The result is the argument `documents` of a score with `Packed`: no token sees another document.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from normattn.errors import InputError


def documents_from_positions(positions: Int[Tensor, "b t"]) -> Int[Tensor, "b t"]:
    """Number documents by position ids that restart with each document, from 0 in each row.

    A document begins where a position is not larger than the one before it, as in the rows of
    transformers' `DataCollatorWithFlattening`.
    """
    if not isinstance(positions, Tensor) or positions.dim() != 2:
        raise InputError("positions must be a tensor (B, T), with a row of ids for each packed row")
    starts = torch.zeros_like(positions)
    starts[:, 1:] = (positions[:, 1:] <= positions[:, :-1]).to(positions.dtype)
    return starts.cumsum(1)


def documents_from_ends(ends: Bool[Tensor, "b t"]) -> Int[Tensor, "b t"]:
    """Number documents from 0 in each row by `ends`, True at their last token, the separator."""
    ends = ends.long()
    return ends.cumsum(-1) - ends


def documents_from_lengths(cu_seqlens: Int[Tensor, " n_1"]) -> Int[Tensor, "1 t"]:
    """Number the documents of one row by the cumulative lengths 0, n_1, n_1 + n_2, …

    They are flash-attention's `cu_seqlens`. Raises `InputError` unless they rise from 0.
    """
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise InputError("cu_seqlens must be a tensor of whole numbers (int64 or int32)")
    lengths = cu_seqlens.diff()
    if len(cu_seqlens) < 2 or int(cu_seqlens[0]) != 0 or bool((lengths < 1).any()):
        raise InputError(
            "cu_seqlens must start with 0 and increase, with one number more than there are "
            f"documents, got {cu_seqlens.tolist()[:8]}"
        )
    numbers = torch.arange(len(lengths), device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return numbers.repeat_interleave(lengths)[None]

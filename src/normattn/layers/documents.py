"""Which document each token of a packed row is part of, from what data loaders hand over.

A score with `Packed` takes the result as `documents=`: no token sees another document.
Legend: B batch, T tokens, N documents.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from normattn.errors import InputError


def documents_from_positions(positions: Int[Tensor, "b t"]) -> Int[Tensor, "b t"]:
    """The document of each token, from 0 in each row, where position ids start again with each.

    A document begins where a position is not larger than the one before it, as in the rows of
    transformers' `DataCollatorWithFlattening`.
    """
    starts = torch.zeros_like(positions)
    starts[:, 1:] = (positions[:, 1:] <= positions[:, :-1]).to(positions.dtype)
    return starts.cumsum(1)


def documents_from_ends(ends: Bool[Tensor, "b t"]) -> Int[Tensor, "b t"]:
    """The document of each token, from 0 in each row, where `ends` is True at its last token.

    A separator between documents so belongs to the one that it ends.
    """
    ended = ends.long()
    return ended.cumsum(-1) - ended


def documents_from_lengths(cu_seqlens: Int[Tensor, " n_1"]) -> Int[Tensor, "1 t"]:
    """The document of each token of one row, from the cumulative lengths 0, n_1, n_1 + n_2, …

    Those are the `cu_seqlens` of flash-attention. Raises `InputError` where they do not begin at 0
    or do not grow.
    """
    lengths = cu_seqlens.diff()
    if len(cu_seqlens) < 2 or int(cu_seqlens[0]) != 0 or bool((lengths < 1).any()):
        raise InputError(
            "cu_seqlens must start with 0 and increase, with one number more than there are "
            f"documents, got {cu_seqlens.tolist()[:8]}"
        )
    numbers = torch.arange(len(lengths), device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return numbers.repeat_interleave(lengths)[None]

"""Tensors (B, H, T, D) that do not lie in memory as a kernel may wish.

Each function gives a view of its argument's values, known to autograd; the expanded ones repeat
some of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

Layout = Callable[[Tensor], Tensor]


def tokens_first(x: Tensor) -> Tensor:
    """As heads cut from one projection."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def features_first(x: Tensor) -> Tensor:
    """As a Conv1d gives it: the last axis has the stride T."""
    return x.mT.contiguous().mT


def stepped(x: Tensor) -> Tensor:
    """Every second feature of something."""
    return torch.stack((x, torch.full_like(x, 9.0)), -1).flatten(-2)[..., ::2]


def skipping(x: Tensor) -> Tensor:
    """Every second row of something."""
    return torch.stack((x, torch.full_like(x, 9.0)), 3).flatten(2, 3)[:, :, ::2]


def sliced(x: Tensor) -> Tensor:
    """Out of the middle of something: an offset, and gaps between rows and heads."""
    return F.pad(x, (3, 2, 2, 1), value=9.0)[:, :, 2:-1, 3:-2]


def one_head(x: Tensor) -> Tensor:
    """The first head for all."""
    return x[:, :1].expand_as(x)


def one_row(x: Tensor) -> Tensor:
    """The first row of the batch for all."""
    return x[:1].expand_as(x)


def one_token(x: Tensor) -> Tensor:
    """The first token for all."""
    return x[:, :, :1].expand_as(x)


def one_feature(x: Tensor) -> Tensor:
    """The first feature for all."""
    return x[..., :1].expand_as(x)


ORDINARY: tuple[Layout, ...] = (
    *(tokens_first, features_first, stepped, skipping, sliced, one_head, one_row),
)
EVERY: tuple[Layout, ...] = (*ORDINARY, one_token, one_feature)


def laid(qkv: Sequence[Tensor], cell: str) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in layouts that the cell's name decides, none contiguous."""
    number = zlib.crc32(cell.encode())
    q, k, v = qkv
    one, two = ORDINARY[number % 7], ORDINARY[number // 7 % 7]
    return one(q), two(k), EVERY[number // 49 % 9](v)

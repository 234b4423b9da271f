"""Log-n scaling, trained in (`logn`) or switched on afterwards (`logn+`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.score.folded_parts import LogNPart
from normattn.score.part import When
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class LogN(LogNPart):
    """λ · ln n / ln L at every position (kexue.fm/archives/8823).

    n is the number of visible keys: position + 1 when causal, the number of unpadded keys
    otherwise. For CosA it replaces ln m and multiplies nothing.
    """

    name: ClassVar[str] = "logn"
    summary: ClassVar[str] = "scale grows with the logarithm of the visible keys, trained in"
    equation: ClassVar[str] = "λ ← λ · ln n / ln L"
    source: ClassVar[str] = "kexue.fm/archives/8823"
    when: ClassVar[When] = "trained-in"
    replaces_base: ClassVar[bool] = True

    def factor(self, n: Float[Tensor, "..."], train_length: int | None) -> Float[Tensor, "..."]:
        """ln n / ln L."""
        return log_ratio(n, train_length)


@register
@dataclass(frozen=True)
class LogNPostHoc(LogNPart):
    """λ · max(1, ln n / ln L), so nothing changes inside the training length (kexue 9708)."""

    name: ClassVar[str] = "logn+"
    summary: ClassVar[str] = "log-n scaling after training, beyond the training length only"
    equation: ClassVar[str] = "λ ← λ · max(1, ln n / ln L)"
    source: ClassVar[str] = "kexue.fm/archives/9708"
    when: ClassVar[When] = "post-hoc"

    def factor(self, n: Float[Tensor, "..."], train_length: int | None) -> Float[Tensor, "..."]:
        """max(1, ln n / ln L)."""
        # Chosen by n, not by the ratio: exactly 1 up to n = L whatever the logarithms' rounding.
        ratio = log_ratio(n, train_length)
        assert train_length is not None
        return torch.where(n > train_length, ratio, 1.0)


def log_ratio(n: Float[Tensor, "..."], train_length: int | None) -> Float[Tensor, "..."]:
    """ln n / ln L."""
    if train_length is None:
        raise InputError("log-n scaling needs the training length")
    return n.log() / math.log(train_length)

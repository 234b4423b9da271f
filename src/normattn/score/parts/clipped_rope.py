"""ClippedRoPE: frequencies too low for the training length taper off to 0."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.score.folded_parts import SpectrumPart, rope_frequencies
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class ClippedRoPE(SpectrumPart):
    """The c lowest θ_m times ½(1 + cos(π·t)), t = 0 … 1 from the first to the last of them.

    "CoPE: Clipped RoPE" (arXiv 2602.05258; the authors' modeling_cope.py). `clip` c defaults to the
    pairs that do not turn once within the training length, 2π/θ_m > L, which is how the paper
    names them; the authors' Llama 3 file writes c = 20 where this rule gives 29. The first of the
    c keeps its frequency, the last stands still; c = 1 changes nothing.
    """

    name: ClassVar[str] = "ClippedRoPE"
    summary: ClassVar[str] = "frequencies that do not turn once within L taper off to 0"
    equation: ClassVar[str] = "θ'_{d/2−c+t} = θ·½(1 + cos(π·t/(c−1))), t = 0 … c−1"
    source: ClassVar[str] = "arXiv 2602.05258; github.com/hrlics/CoPE"
    clip: int | None = None

    def __post_init__(self) -> None:
        self.require(self.clip is None or self.clip >= 0, "clip", "at least 0")

    def missing(self, train_length: int | None) -> str | None:
        """The number of pairs, or the training length that gives it."""
        return "clip" if self.clip is None and train_length is None else None

    def inverse_frequencies(
        self, head_dim: int, base: float, train_length: int | None
    ) -> Float[Tensor, "half"]:
        """θ_m, the last c of them tapered."""
        theta = rope_frequencies(head_dim, base)
        clip = self.clip
        if clip is None:
            if train_length is None:
                raise InputError("ClippedRoPE needs the training length or clip=…")
            clip = int((theta * train_length < 2 * math.pi).sum())
        clip = min(clip, theta.numel())
        taper = torch.linspace(0, math.pi, clip, dtype=torch.float64).cos().add(1) / 2
        return torch.cat((theta[: theta.numel() - clip], theta[theta.numel() - clip :] * taper))

"""Length scaling: how λ grows with the number of visible keys, n, or with the position."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.score.parts.base import TRAIN_LENGTH, Part, Slot, number, one_of, register

Learned = Mapping[str, Tensor]
Counts = Float[Tensor, "*b one_or_h t"]


@dataclass(frozen=True)
class LengthScaling(Part):
    """A factor of λ that grows with the number of visible keys, n.

    n is the position + 1 if causal, else the number of unpadded keys. `replaces_base`: it replaces
    the constant part of λ in variants with a base that depends on n (CosA).
    """

    slot = Slot.LOGN
    needs_length = True
    replaces_base: ClassVar[bool] = False

    def factor(self, n: Float[Tensor, "..."], train_length: int | None) -> Float[Tensor, "..."]:
        """The multiplier of λ for n visible keys; 1 where it is learned."""
        return torch.ones_like(n)

    def learned(self, heads: int, train_length: int | None) -> dict[str, Float[Tensor, "h"]]:
        """The initial values of learned parameters, by name; empty by default."""
        return {}

    def learned_factor(self, n: Counts, learned: Learned) -> Float[Tensor, "*b h t"]:
        """A learned multiplier of λ for n visible keys; n has a head axis, of size 1 if shared."""
        raise InputError(f"{self.name} learns nothing")

    def log_ratio(self, n: Float[Tensor, "..."], train_length: int | None) -> Float[Tensor, "..."]:
        """ln n / ln L."""
        return n.log() / math.log(self.required_length(train_length))


@register
class LogN(LengthScaling):
    """Scale grows with the logarithm of the number of visible keys, at training time.

    In CosA, ln n replaces ln m and nothing else changes.
    """

    name = "logn"
    equation = "λ ← λ · ln n / ln L"
    source = "kexue.fm/archives/8823"
    replaces_base = True

    def factor(self, n: Float[Tensor, "..."], train_length: int | None) -> Float[Tensor, "..."]:
        """ln n / ln L."""
        return self.log_ratio(n, train_length)


@register
class LogNPostHoc(LengthScaling):
    """Log-n scaling at inference time, only beyond the training length."""

    name = "logn+"
    equation = "λ ← λ · max(1, ln n / ln L)"
    source = "kexue.fm/archives/9708"
    when = "inference-time"

    def factor(self, n: Float[Tensor, "..."], train_length: int | None) -> Float[Tensor, "..."]:
        """max(1, ln n / ln L)."""
        # Compares n, not the ratio, so that rounding cannot change the factor 1 up to n = L.
        ratio = self.log_ratio(n, train_length)
        return torch.where(n > self.required_length(train_length), ratio, 1.0)


@register
class YaRNTemperature(LengthScaling):
    """YaRN's temperature for the current length, only beyond the training length.

    Frequencies do not change. Qwen2.5-1M is served with `DualChunk` and this: vLLM multiplies
    queries and keys by 1 + `sharpness`·ln(n/L), where n is the length of the text. Here n is that
    of each row, so that prefill and token-by-token decoding agree.
    """

    equation = "λ ← λ · (1 + sharpness·ln(max(1, n/L)))²"
    source = "arXiv 2309.00071, 2501.15383; vLLM, dual_chunk_flash_attn.py"
    used_by = "Qwen2.5-1M (with DualChunk)"
    when = "inference-time"
    sharpness: float = number(default=0.1, least=0)

    def factor(self, n: Float[Tensor, "..."], train_length: int | None) -> Float[Tensor, "..."]:
        """(1 + sharpness·ln(max(1, n/L)))²."""
        beyond = (n / self.required_length(train_length)).clamp(min=1)
        return (1 + self.sharpness * beyond.log()).square()


@register
class SqrtLogN(LengthScaling):
    """Scale grows with the square root of the logarithm of the number of visible keys.

    Logits of independent normal keys reach √(2 ln n) standard deviations. At this scale the largest
    of them neither fades nor takes all the attention. λ is unchanged at n = L; CosA keeps its base.
    """

    equation = "λ ← λ · √(ln n / ln L)"
    source = "arXiv 2605.12697"

    def factor(self, n: Float[Tensor, "..."], train_length: int | None) -> Float[Tensor, "..."]:
        """√(ln n / ln L)."""
        return self.log_ratio(n, train_length).sqrt()


@register
class SSMax(LengthScaling):
    """Scale grows with a learned multiple of ln n, per head.

    This is n^(s_h·z_j) / Σ n^(s_h·z) instead of softmax(z); with `bias` λ · (s_h·ln n + b_h), as in
    the paper's comparison. s_h starts where the mean of s·ln n over n = 1 … L is 1, ordinary
    softmax on average, and b_h at 0.
    """

    equation = "λ ← λ · s_h·ln n (+ b_h), s_h learned"
    source = "arXiv 2501.19399"
    bias: bool = False

    def learned(self, heads: int, train_length: int | None) -> dict[str, Float[Tensor, "h"]]:
        """s = L / Σ ln n over n = 1 … L, and b = 0."""
        length = self.required_length(train_length)
        initial = {"s": torch.full((heads,), length / math.lgamma(length + 1))}
        return initial | {"b": torch.zeros(heads)} if self.bias else initial

    def learned_factor(self, n: Counts, learned: Learned) -> Float[Tensor, "*b h t"]:
        """s_h·ln n + b_h."""
        factor = learned["s"].to(n.dtype)[:, None] * n.log()
        return factor + learned["b"].to(n.dtype)[:, None] if self.bias else factor


@register
class ASScale(LengthScaling):
    """Scale grows with a learned power of the logarithm of the visible keys, per head.

    With `Entmax` this is ASEntmax, in the form where β_h and γ_h are numbers for each head. In the
    authors' other form both are projections of the input. β starts at U(0.1, 1), γ at N(0, 0.1²).
    """

    equation = "λ ← λ · (delta + β_h·(ln(n+1))^(γ_h)), β_h, γ_h learned"
    source = "arXiv 2506.16640; github.com/deep-spin/asentmax, attn_scale_type learn"
    needs_length = False
    delta: float = number(default=1.0, least=0)

    def learned(self, heads: int, train_length: int | None) -> dict[str, Float[Tensor, "h"]]:
        """β and γ, drawn from torch's global generator."""
        return {"beta": torch.empty(heads).uniform_(0.1, 1.0), "gamma": 0.1 * torch.randn(heads)}

    def learned_factor(self, n: Counts, learned: Learned) -> Float[Tensor, "*b h t"]:
        """delta + β_h·(ln(n + 1))^(γ_h)."""
        beta, gamma = (learned[name].to(n.dtype)[:, None] for name in ("beta", "gamma"))
        return self.delta + beta * (n + 1).log() ** gamma


@register
class Temperature(LengthScaling):
    """Logits grow with the logarithm of the position, in steps.

    `beta` is β; `length` is L₀, by default the training length. Ministral 3 has shift = 0. Llama 4
    has shift = 1, only in its layers without positions (`IRoPE(beta=…, length=…)`). i is n − 1, the
    number of keys before a causal query's own. Without causality all queries have the last's scale.
    """

    equation = "λ ← λ · (1 + β·ln(1 + ⌊(i + shift)/L₀⌋))"
    source = "transformers: ministral3, llama4"
    used_by = "Ministral 3, Llama 4"
    needs_length = False
    beta: float = number(default=0.1, least=0)
    length: int | None = number(default=None, least=1, fill=TRAIN_LENGTH)
    shift: int = one_of(0, 1, default=0)

    def factor(self, n: Float[Tensor, "..."], train_length: int | None) -> Float[Tensor, "..."]:
        """1 + β·ln(1 + ⌊(n − 1 + shift)/L₀⌋)."""
        length: int = self.required("length")
        return 1 + self.beta * ((n - 1 + self.shift) / length).floor().log1p()

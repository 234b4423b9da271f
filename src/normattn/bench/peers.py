"""The peers of our attention as entries: the stock kernel, flex_attention, two full matrices.

Legend: B batch, H heads, N tokens, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from normattn.bench.attending import Call, Causal, OfCausal, slopes_of
from normattn.errors import InputError
from normattn.lab.runs.timing import Step


@dataclass(frozen=True)
class Stock(OfCausal):
    """Causal `scaled_dot_product_attention`, bare or behind the usual rotate-half RoPE."""

    rope: bool = False

    def build(self) -> Step:
        """The call on fixed queries, keys and values."""
        q, k, v = self.call.tensors(3)
        if not self.rope:
            return self.call.step(
                lambda: scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v)
            )
        turn = Turn.at(torch.arange(self.call.length), self.call)

        def rotated() -> Tensor:
            return scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)

        return self.call.step(rotated, (q, k, v))


@dataclass(frozen=True)
class MaskedALiBi(OfCausal):
    """The stock kernel with a mask that holds −m_h·(i − j) of every pair: (H, N, N) numbers.

    With `learned` the slopes want a gradient, as every learned bias does, and the mask is made
    anew in each step.
    """

    learned: bool = False

    def build(self) -> Step:
        """The call on fixed queries, keys and values."""
        q, k, v = self.call.tensors(3)
        slopes = slopes_of(self.call.heads).to(q).requires_grad_(self.learned)
        positions = torch.arange(self.call.length, device=self.call.device)
        distance = (positions[:, None] - positions).to(q.dtype)
        future = distance < 0

        def mask() -> Tensor:
            return (-slopes[:, None, None] * distance).masked_fill(future, -torch.inf)[None]

        with torch.no_grad():
            fixed = mask()
        if not self.learned:
            return self.call.step(
                lambda: scaled_dot_product_attention(q, k, v, attn_mask=fixed), (q, k, v)
            )
        return self.call.step(
            lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask()), (q, k, v, slopes)
        )


@dataclass(frozen=True)
class Flex(OfCausal):
    """Compiled `flex_attention`, causal, bare or with ALiBi's bias: the peer on a GPU."""

    alibi: bool = False

    def build(self) -> Step:
        """The call on fixed queries, keys and values."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if self.call.device == "cpu":
            raise InputError("flex_attention has no backward on a CPU; it is a peer on a GPU only")
        q, k, v = self.call.tensors(3)
        size, slopes = self.call.length, slopes_of(self.call.heads).to(q.device)

        def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return i >= j

        def sloped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score - slopes[h] * (i - j)

        mask = create_block_mask(seen, None, None, size, size, device=self.call.device)
        compiled = torch.compile(flex_attention)
        change = sloped if self.alibi else None
        return self.call.step(
            lambda: compiled(q, k, v, score_mod=change, block_mask=mask), (q, k, v)
        )


@dataclass(frozen=True)
class TwoMatrices(OfCausal):
    """ReRoPE as its author writes it: two full score matrices, and a choice between them.

    s(i, j) = ⟨R_i q_i, R_j k_j⟩/√D where i − j < window, else ⟨R_w q_i, k_j⟩/√D
    (kexue.fm/archives/9708), with PyTorch's own operations.
    """

    window: int

    def build(self) -> Step:
        """The call on fixed queries, keys and values."""
        q, k, v = self.call.tensors(3)
        return self.call.step(self.of(q, k, v), (q, k, v))

    def of(self, q: Tensor, k: Tensor, v: Tensor) -> Call:
        """The call on these tensors."""
        positions = torch.arange(self.call.length, device=self.call.device)
        near = Turn.at(positions, self.call)
        far = Turn.at(torch.full_like(positions, self.window), self.call)
        distance = positions[:, None] - positions
        hidden = torch.zeros_like(distance, dtype=q.dtype).masked_fill(distance < 0, -torch.inf)

        def call() -> Tensor:
            first = near(q) @ near(k).transpose(-1, -2) / self.call.size**0.5
            second = far(q) @ k.transpose(-1, -2) / self.call.size**0.5
            score = torch.where(distance < self.window, first, second) + hidden
            return torch.softmax(score, -1) @ v

        return call


@dataclass(frozen=True)
class Turn:
    """RoPE as it is usually written: x·cos + rotate_half(x)·sin, base 10000."""

    cos: Float[Tensor, "n d"]
    sin: Float[Tensor, "n d"]

    @classmethod
    def at(cls, positions: Tensor, call: Causal) -> Turn:
        """The tables of these positions in the call's precision."""
        half = call.size // 2
        frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = positions.cpu().double()[:, None] * frequency.repeat(2)
        return cls(*(x.to(call.device, call.dtype) for x in (angle.cos(), angle.sin())))

    def __call__(self, x: Float[Tensor, "*bh n d"]) -> Float[Tensor, "*bh n d"]:
        """Turn every token by its position."""
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat((-second, first), -1) * self.sin

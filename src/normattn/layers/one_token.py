"""One new token's attention, with everything that does not depend on the token made beforehand.

A decode step reads keys and values once; a few operations more on the way would cost as much. So
where nothing but position decides the fold, its tables are laid out for the whole cache: turning
costs three operations, λ goes to the stock kernel as its scale, a bias as a slice of one row.

Legend: B batch, H query heads, G key heads, S tokens in all, D head dimension, E value size,
C capacity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from normattn.kernels.numerics import nan_for_infinite, readable
from normattn.layers.attend import regular_positions
from normattn.layers.cache import KeyValueCache
from normattn.score import Score, ScoreSpec
from normattn.score.norms import L2Norm
from normattn.score.parts import PairBiasPart, RotaryPosition
from normattn.score.rotary import ChunkKeys, ChunkQueries, Rotation, key_tables, query_scale


@dataclass(frozen=True)
class Turn:
    """A rotation of one token: feature x becomes x·cos + x[partner]·sin, with the signs in sin."""

    cos: Float[Tensor, "c *n d"]
    sin: Float[Tensor, "c *n d"]
    partner: Int[Tensor, "*b d"]


@dataclass(frozen=True)
class Step:
    """What a step was made for: a score, tensors of these shapes and this dtype, a capacity.

    `bare` is whether the score asks nothing of a layer beside queries, keys and values. `unit` is
    the eps of keys of length 1 where these are all that is normalised, and `alike` whether queries
    and keys are normalised in one way, head by head, without a gain. `read` is whether the host may
    look at a number.
    """

    spec: ScoreSpec
    shapes: tuple[torch.Size, torch.Size, torch.Size]
    dtype: torch.dtype
    capacity: int
    bare: bool
    unit: float | None
    alike: bool
    read: bool

    @staticmethod
    def of(score: Score, length: int, q: Tensor, k: Tensor, v: Tensor) -> Step:
        """What a step over a cache of `length` tokens is made for."""
        spec, capacity = score.spec, max(64, 1 << length.bit_length())
        query, key = spec.variant.query_norm(), spec.variant.key_norm()
        return Step(
            spec,
            (q.shape, k.shape, v.shape),
            q.dtype,
            capacity,
            bare=spec.gate is None and spec.difference is None,
            unit=score.key_norm.eps
            if query is None and isinstance(score.key_norm, L2Norm)
            else None,
            alike=key is not None and key == query and key.by_head and not key.gain,
            read=readable(q),
        )

    def fits(self, score: Score, q: Tensor, k: Tensor, v: Tensor, cache: KeyValueCache) -> bool:
        """Whether it serves this call, whose tensors then are what was checked when it was made."""
        return (
            score.spec is self.spec
            and cache.length < self.capacity
            and (q.shape, k.shape, v.shape) == self.shapes
            and q.dtype is k.dtype is v.dtype is self.dtype
            and q.layout is k.layout is v.layout is torch.strided
        )

    def normed(self, q: Tensor, k: Tensor, score: Score) -> Float[Tensor, "b heads 1 d"]:
        """Query and key as the score normalises them, side by side.

        Both at once where that can be, and a key of length 1 in as few calls as there are: so small
        a tensor costs its calls, not its numbers.
        """
        if self.alike:
            assert score.key_norm is not None
            both: Tensor = score.key_norm(torch.cat((q, k), 1))
            return both
        if self.unit is not None:
            k = k / torch.linalg.vector_norm(k, dim=-1, keepdim=True).clamp_min(self.unit)
        elif score.key_norm is not None:
            k = score.key_norm(k)
        if score.query_norm is not None:
            q = score.query_norm(q)
        return torch.cat((q, k), 1)

    def spoilt(self, both: Tensor) -> tuple[Tensor, bool]:
        """The same with NaN for infinities, and whether some number is seen not to be finite."""
        read = self.read and not torch.compiler.is_compiling()
        diverged = read and not math.isfinite(both.sum(dtype=torch.float32).item())
        return (both if read and not diverged else nan_for_infinite(both)), diverged


@dataclass(frozen=True)
class OneToken:
    """Tables for positions 0 … C − 1 of one score in one dtype.

    `turn` is None where nothing turns, and its partners are those of all features of a query and a
    key. `scale` holds λ of every position, or is λ. `bias` is b(C − 1 − r) from left to right, per
    head.
    """

    step: Step
    scale: list[float] | float
    turn: Turn | None
    bias: Float[Tensor, "h c"] | None
    window: int | None

    def __call__(
        self,
        q: Float[Tensor, "b h 1 d"],
        k: Float[Tensor, "b g 1 d"],
        v: Float[Tensor, "b g 1 e"],
        score: Score,
        cache: KeyValueCache,
    ) -> Float[Tensor, "b h 1 e"]:
        """The token's output; its key and value join the cache."""
        at, heads, groups = cache.length, q.shape[1], k.shape[1]
        both, diverged = self.step.spoilt(self.step.normed(q, k, score))
        turn = self.turn
        if turn is not None:
            partner = both.gather(-1, turn.partner)
            both = torch.addcmul(both * turn.cos[at], partner, turn.sin[at])
        q, k = both.split_with_sizes((heads, groups), 1)
        keys, values = cache.append(k, v)
        if self.window is not None and keys.shape[2] > self.window:
            keys, values = keys[:, :, -self.window :], values[:, :, -self.window :]
        mask = None
        if self.bias is not None:
            mask = self.bias[None, :, None, self.step.capacity - keys.shape[2] :]
        scale = self.scale if isinstance(self.scale, float) else self.scale[at]
        if score.scale is not None:
            scale = scale * float(score.scale)
        if diverged or v.shape[-1] != q.shape[-1]:
            # The kernel copies values of another size, and may give 0 where all is NaN.
            return _by_hand(q * scale, keys, values, mask)
        return scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, scale=scale, enable_gqa=heads != groups
        )


def _by_hand(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q kᵀ + mask) v for values of another size than keys, which the kernel copies.

    Query heads that share a key head are rows of one product.
    """
    score = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[-1]) @ keys.transpose(-1, -2)
    if mask is not None:
        score += mask.reshape(1, *score.shape[1:])
    return (torch.softmax(score, -1) @ values).flatten(1, 2)[:, :, None]


def serves(score: Score, q: Tensor) -> bool:
    """Whether the folded query, key and one bias are all that the score asks."""
    return foldable(score, q) and score.spec.remapping is None


def foldable(score: Score, q: Tensor) -> bool:
    """Whether position alone decides what is folded into a query and a key."""
    spec = score.spec
    plain = spec.order is None and spec.cap is None and score.sink is None and score.logn is None
    growing = (
        isinstance(spec.position, RotaryPosition)
        and spec.position.log_growth(score.head_dim) is not None
    )
    plain = plain and spec.chunk is None and not spec.forgets
    plain = plain and not getattr(spec.position, "widens", False)
    plain = plain and not isinstance(spec.bias, PairBiasPart)
    plain = plain and spec.normaliser is None and spec.selection is None
    wide = q.dtype in (torch.float32, torch.float64)
    wide = wide and not torch.is_autocast_enabled(q.device.type)
    return plain and wide and not spec.blockwise and not growing


def made(score: Score, length: int, q: Tensor, k: Tensor, v: Tensor) -> OneToken:
    """The tables for a cache that is `length` tokens long now."""
    spec, step = score.spec, Step.of(score, length, q, k, v)
    with torch.inference_mode(False):
        at = regular_positions(step.capacity, step.capacity, q.device)
        scale = query_scale(spec, score.head_dim, at.n)
        rotation = key_tables(spec, score.head_dim, at.key, q.dtype, 0).near
        bias = None
        if spec.bias is not None:
            learned = {} if score.bias is None else dict(score.bias.items())
            bias = spec.bias.values(at.key.to(q.dtype), score.heads, learned)
            bias = bias.detach().flip(-1).to(q.dtype)
        turn = None if rotation is None else spread(laid_out(rotation, q), q, k)
    scales: list[float] | float = scale.tolist() if isinstance(scale, Tensor) else float(scale)
    return OneToken(step, scales, turn, bias, window=spec.window[0])


def spread(turn: Turn, q: Tensor, k: Tensor) -> Turn:
    """The turn with a partner for each feature of query and key, the query's heads first."""
    heads = q.shape[1] + k.shape[1]
    return replace(turn, partner=turn.partner.expand(q.shape[0], heads, 1, -1))


def laid_out(rotation: Rotation | ChunkQueries | ChunkKeys, q: Tensor) -> Turn:
    """A rotation's tables, a number for each feature."""
    # Rules by chunks move, and what moves is not foldable.
    assert isinstance(rotation, Rotation)
    cos, sin, rest = (
        x[: rotation.cos.shape[0]].to(q.dtype) for x in (rotation.cos, rotation.sin, rotation.rest)
    )
    size, turned = q.shape[-1], 2 * cos.shape[-1]
    index = torch.arange(size, device=q.device)
    pairs = index[:turned]
    if rotation.interleaved:
        cos, sin = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
        partner = pairs ^ 1
    else:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        partner = (pairs + turned // 2) % turned
    rest = rest.expand(-1, size - turned)
    cos, sin = torch.cat((cos, rest), -1), torch.cat((sin, torch.zeros_like(rest)), -1)
    partner = torch.cat((partner, index[turned:]))
    if rotation.start:  # the features that turn stand behind as many of the others
        cos, sin = cos.roll(rotation.start, -1), sin.roll(rotation.start, -1)
        partner = (partner.roll(rotation.start) + rotation.start) % size
    return Turn(cos, sin, partner)

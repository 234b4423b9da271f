"""One new token's attention, with everything that does not depend on the token made beforehand.

A decode step reads keys and values once; a few operations more on the way would cost as much. So
where nothing but position decides the fold, its tables are laid out for the whole cache: turning
costs three operations, λ goes to the stock kernel as its scale, a bias as a slice of one row.

Legend: B batch, H query heads, G key heads, S tokens in all, D head dimension, C capacity.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from normattn.layers.attend import regular_positions
from normattn.layers.cache import KeyValueCache
from normattn.score import Score, ScoreSpec
from normattn.score.fold import key_fold, query_scale
from normattn.score.part import RotaryPosition
from normattn.score.rotary import Rotation


@dataclass(frozen=True)
class OneToken:
    """Tables for positions 0 … C − 1 of one score in one dtype.

    A feature x becomes x·`cos` + x[`partner`]·`sin`; None where nothing turns. `scale` holds λ of
    every position, or is λ. `bias` is b(C − 1 − r) from left to right, per head.
    """

    spec: ScoreSpec
    dtype: torch.dtype
    capacity: int
    scale: list[float] | float
    cos: Float[Tensor, "c d"] | None
    sin: Float[Tensor, "c d"] | None
    partner: Tensor | None
    bias: Float[Tensor, "h c"] | None
    window: int | None

    def __call__(
        self,
        q: Float[Tensor, "b h 1 d"],
        k: Float[Tensor, "b g 1 d"],
        v: Float[Tensor, "b g 1 d"],
        score: Score,
        cache: KeyValueCache,
    ) -> Float[Tensor, "b h 1 d"]:
        """The token's output; its key and value join the cache."""
        at = cache.length
        if score.query_norm is not None:
            q = score.query_norm(q)
        if score.key_norm is not None:
            k = score.key_norm(k)
        if self.cos is not None and self.sin is not None and self.partner is not None:
            cos, sin = self.cos[at], self.sin[at]
            q = torch.addcmul(q * cos, q.index_select(-1, self.partner), sin)
            k = torch.addcmul(k * cos, k.index_select(-1, self.partner), sin)
        keys, values = cache.append(k, v)
        if self.window is not None and keys.shape[2] > self.window:
            keys, values = keys[:, :, -self.window :], values[:, :, -self.window :]
        mask = None
        if self.bias is not None:
            mask = self.bias[None, :, None, self.capacity - keys.shape[2] :]
        scale = self.scale if isinstance(self.scale, float) else self.scale[at]
        if score.scale is not None:
            scale = scale * float(score.scale)
        grouped = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped
        )


def one_token(score: Score, cache: KeyValueCache, q: Tensor, v: Tensor) -> OneToken | None:
    """The tables for the next token, kept in the cache; None where more than they say is needed."""
    found = cache.one_token
    if (
        isinstance(found, OneToken)
        and found.spec is score.spec
        and found.capacity > cache.length
        and found.dtype == q.dtype
    ):
        return found
    if not _serves(score, q, v):
        return None
    cache.one_token = made = _made(score, cache.length, q)
    return made


def _serves(score: Score, q: Tensor, v: Tensor) -> bool:
    """Whether the stock kernel can take all that the score asks of one row."""
    spec = score.spec
    plain = spec.order is None and spec.regime is None and spec.cap is None and score.sink is None
    growing = (
        isinstance(spec.position, RotaryPosition)
        and spec.position.log_growth(score.head_dim) is not None
    )
    wide = q.dtype in (torch.float32, torch.float64)
    return plain and wide and not spec.moves and not growing and v.shape[-1] == q.shape[-1]


def _made(score: Score, length: int, q: Tensor) -> OneToken:
    spec, capacity = score.spec, max(64, 1 << length.bit_length())
    with torch.inference_mode(False):
        at = regular_positions(capacity, capacity, q.device)
        scale = query_scale(spec, score.head_dim, at.n)
        rotation = key_fold(spec, score.head_dim, at.key, q.dtype, 0).near
        bias = None
        if spec.bias is not None:
            learned = {} if score.bias is None else dict(score.bias.items())
            bias = spec.bias.values(at.key.to(q.dtype), score.heads, learned)
            bias = bias.detach().flip(-1).to(q.dtype)
        cos, sin, partner = (None, None, None) if rotation is None else _laid_out(rotation, q)
    scales: list[float] | float = scale.tolist() if isinstance(scale, Tensor) else float(scale)
    return OneToken(
        spec, q.dtype, capacity, scales, cos, sin, partner, bias, window=spec.visible[0]
    )


def _laid_out(rotation: Rotation, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """cos, ± sin and the index of the other feature of the pair, for each feature."""
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
    return cos, sin, torch.cat((partner, index[turned:]))

"""What one more token beside a cache needs of its score, prepared for the tokens to come.

So small a call costs its operations, not its numbers. Where position alone decides what folds into
a query and a key, `DecodeTables` rotate both at once, by rows of a table for the whole cache.

Legend: B batch, H query heads, G key heads, S tokens in all, D head dimension, E value size, C
capacity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from normattn.errors import InputError
from normattn.kernels.inputs import Selection
from normattn.kernels.numerics import nan_for_infinite, readable
from normattn.layers.cache import KeyValueCache, Room
from normattn.layers.prepare import folds, regular_positions
from normattn.score import Positions, Score, ScoreSpec
from normattn.score.norms import FeatureNorm
from normattn.score.parts import PairBiasPart, RotaryPosition
from normattn.score.rotary import (
    Rotation,
    feature_pairs,
    key_tables,
    query_scale,
    query_tables,
)


@dataclass(frozen=True, eq=False)
class Turns:
    """Rotations by a row of a table: feature f becomes x_f·cos + x_partner(f)·sin.

    cos and sin are (C, D), or (C, 2, 1, 1, 1, D) for a near and a far position.
    """

    cos: Float[Tensor, "c *n d"]
    sin: Float[Tensor, "c *n d"]
    partner: Int[Tensor, " d"]

    def __call__(self, x: Tensor, partners: Tensor, at: int) -> Tensor:
        """x at a position."""
        return torch.addcmul(x * self.cos[at], partners, self.sin[at])

    @staticmethod
    def of(near: object, far: object, dtype: torch.dtype, size: int) -> Turns | None:
        """The tables of a near rotation and, if there is one, a far one, feature by feature."""
        if near is None:
            return None
        # Rules by chunks are read by blocks, and have no decode step.
        tables = [_by_feature(x, dtype, size) for x in (near, far) if isinstance(x, Rotation)]
        if len(tables) == 1:
            return Turns(*tables[0])
        cos, sin = (
            torch.stack((tables[0][n], tables[1][n]), 1)[:, :, None, None, None] for n in (0, 1)
        )
        return Turns(cos, sin, tables[0][2])


def _by_feature(
    turn: Rotation, dtype: torch.dtype, size: int
) -> tuple[Float[Tensor, "c d"], Float[Tensor, "c d"], Int[Tensor, " d"]]:
    """cos and signed sin for every feature, and the other feature of its pair."""
    first, second = feature_pairs(turn.start, turn.cos.shape[-1], turn.interleaved)
    cos = turn.rest.expand(-1, size).clone()
    sin, own = torch.zeros_like(cos), torch.arange(size, device=cos.device)
    partner = own.clone()
    cos[:, first], cos[:, second] = turn.cos, turn.cos
    sin[:, first], sin[:, second] = -turn.sin, turn.sin
    partner[first], partner[second] = own[second], own[first]
    return cos.to(dtype), sin.to(dtype), partner


@dataclass(frozen=True, eq=False)
class DecodeTables:
    """Tables of positions 0 … C − 1 for one more token of these shapes.

    `key` turns keys and `query` queries; with one regime `key` turns both, and `scale` is λ, of
    every position where it depends on n. `bias` (H, C) holds b(C − 1 − r) from left to right. With
    two regimes the cache has far keys, and the last `near` of them at their near positions as well,
    so that a step rotates one key only. `bare` says that a layer does nothing beside; `unit` is the
    eps of keys of length 1 where only those are normalised.
    """

    spec: ScoreSpec
    shapes: tuple[torch.Size, torch.Size, torch.Size]
    dtype: torch.dtype
    capacity: int
    bare: bool
    scale: list[float] | float
    query: Turns | None
    key: Turns | None
    bias: Float[Tensor, "h c"] | None
    near: int | None
    unit: float | None
    readable: bool

    @staticmethod
    def prepare(score: Score, length: int, q: Tensor, k: Tensor, v: Tensor) -> DecodeTables:
        """The tables for a cache that is `length` tokens long now."""
        spec, capacity, size = score.spec, max(64, 1 << length.bit_length()), score.head_dim
        query, bias = None, None
        scale: list[float] | float = 1.0
        with torch.inference_mode(False):
            at = regular_positions(capacity, capacity, q.device)
            keys = key_tables(spec, size, at.key, q.dtype, 0)
            if spec.remapping is None:
                lambdas = query_scale(spec, size, at.n)
                scale = lambdas.tolist() if isinstance(lambdas, Tensor) else float(lambdas)
            else:
                queries = query_tables(spec, size, at, q.dtype)
                query = Turns.of(queries.near, queries.far, q.dtype, size)
            key = Turns.of(keys.near, keys.far, q.dtype, size)
            if spec.bias is not None:
                learned = {} if score.bias is None else dict(score.bias.items())
                bias = spec.bias.values(at.key.to(q.dtype), score.heads, learned)
                bias = bias.detach().flip(-1).to(q.dtype)
        bare = spec.gate is None and spec.difference is None
        near = None if spec.remapping is None else spec.remapping.window
        shapes = (q.shape, k.shape, v.shape)
        norm = score.key_norm
        unit = norm.eps if isinstance(norm, FeatureNorm) and norm.kind == "l2" else None
        return DecodeTables(
            *(spec, shapes, q.dtype, capacity, bare, scale, query, key, bias, near),
            *(unit if score.query_norm is None else None, readable(q)),
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

    def run(
        self,
        score: Score,
        q: Float[Tensor, "b h 1 d"],
        k: Float[Tensor, "b g 1 d"],
        v: Float[Tensor, "b g 1 e"],
        cache: KeyValueCache,
    ) -> Float[Tensor, "b h 1 e"]:
        """The token's output; its key and value join the cache."""
        at, heads = cache.length, (q.shape[1], k.shape[1])
        # Not by attribute, which is a call of Python each.
        query_norm, key_norm = score._modules.get("query_norm"), score._modules.get("key_norm")
        q = q if query_norm is None else query_norm(q)
        if self.unit is not None:
            k = k / torch.linalg.vector_norm(k, dim=-1, keepdim=True).clamp_min(self.unit)
        elif key_norm is not None:
            k = key_norm(k)
        both = torch.cat((q, k), 1)
        diverged = self.readable and not math.isfinite(both.sum(dtype=torch.float32).item())
        if diverged or not self.readable:
            both = nan_for_infinite(both)
        if self.key is not None:
            partners = both.index_select(-1, self.key.partner)
            if self.query is not None:
                (q, k), others = (
                    both.split_with_sizes(heads, 1),
                    partners.split_with_sizes(heads, 1),
                )
                q, k = self.query(q, others[0], at), self.key(k, others[1], at)
                return self._two_regimes(q if score.scale is None else q * score.scale, k, v, cache)
            both = self.key(both, partners, at)
        q, k = both.split_with_sizes(heads, 1)
        keys, values = cache.append(k, v)
        window = self.spec.window[0]
        if window is not None and keys.shape[2] > window:
            keys, values = keys[:, :, -window:], values[:, :, -window:]
        mask = None
        if self.bias is not None:
            mask = self.bias[None, :, None, self.capacity - keys.shape[2] :]
        scale = self.scale if isinstance(self.scale, float) else self.scale[at]
        scale = scale if score.scale is None else scale * float(score.scale)
        if diverged or v.shape[-1] != q.shape[-1]:
            # The kernel copies values of another size, and may give 0 where all is NaN.
            product = _products(q * scale, keys)
            return _weigh(product if mask is None else product + mask, values)
        return scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, scale=scale, enable_gqa=heads[0] != heads[1]
        )

    def _two_regimes(
        self, q: Tensor, k: Tensor, v: Tensor, cache: KeyValueCache
    ) -> Float[Tensor, "b h 1 e"]:
        """Near and far scores beside each other: near ones are ⟨R_i q, R_j k⟩ whatever i is."""
        assert self.near is not None
        (near_q, far_q), (near_k, far_k) = q.unbind(), k.unbind()
        keys, values = cache.append(far_k, v)
        score = _products(near_q, self._near_keys(cache, keys, near_k))
        if (far := cache.length - self.near) > 0:
            score = torch.cat((_products(far_q, keys[:, :, :far]), score), -1)
        return _weigh(score, values)

    def _near_keys(self, cache: KeyValueCache, keys: Tensor, new: Tensor) -> Tensor:
        """The last keys of the near window at their near positions."""
        assert self.near is not None
        room, end = cache.near, cache.length
        start = max(0, end - self.near)
        if cache.near_end == end - 1 and end - 1 - room.used <= start:
            if room.used > 2 * self.near + 64:
                room.drop(room.used - self.near, 2 * self.near + 65)
            room.append(new)
        else:
            # The cache was filled or cut by other calls: rotate the window once.
            places = torch.arange(start, end)
            given = self.spec, keys.shape[-1], places, keys.dtype, start
            turn = key_tables(*given, far_to_near=True).near
            assert turn is not None
            cache.near = room = Room(2)
            room.append(turn(keys[:, :, start:]))
        cache.near_end = end
        return room.view(room.used)[:, :, start - end :]


def _products(q: Float[Tensor, "b h 1 d"], keys: Float[Tensor, "b g s d"]) -> Tensor:
    """⟨q, k⟩ (B, H, 1, S); query heads that share a key head are rows of one product."""
    rows = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[-1])
    return (rows @ keys.transpose(-1, -2)).reshape(*q.shape[:3], -1)


def _weigh(score: Float[Tensor, "b h 1 s"], values: Float[Tensor, "b g s e"]) -> Tensor:
    """softmax(score) · v (B, H, 1, E)."""
    weights = torch.softmax(score, -1).reshape(values.shape[0], values.shape[1], -1, score.shape[3])
    return (weights @ values).reshape(*score.shape[:3], -1)


def decodes(score: Score, q: Tensor) -> bool:
    """Whether `DecodeTables` serve a score: one bias of the distance may stand beside."""
    spec = score.spec
    beside = spec.cap, score.sink, spec.normaliser, spec.selection
    plain = folds(score) and all(part is None for part in beside)
    plain = plain and not isinstance(spec.bias, PairBiasPart)
    if isinstance(spec.position, RotaryPosition):
        plain = plain and spec.position.log_growth(score.head_dim) is None
    if spec.remapping is not None:
        plain = plain and spec.window[0] is None and spec.bias is None
    return plain and q.dtype in (torch.float32, torch.float64)


def begin_selection(
    cache: KeyValueCache, inputs: Float[Tensor, "b g s d"], first: int, padding: Tensor | None
) -> Selection:
    """What the first tokens took from all of the cached keys; of those after them, nothing."""
    wide = torch.promote_types(inputs.dtype, torch.float32)
    taken = inputs.new_zeros(inputs.shape[0], inputs.shape[2], dtype=wide)
    if first:
        if first not in cache.selected:
            raise InputError(
                f"this cache lacks what its first {first} tokens have selected, for a call before "
                "this one failed: make a new cache"
            )
        before = cache.selected[first]
        taken[:, : before.shape[1]] = before
    return Selection(taken, padding)


class BlockKeys:
    """The keys of a cache as the rows of each block read them, for a score that works by blocks.

    Those of the blocks that the last rows are in stay with the cache: the next tokens want them.
    """

    def __init__(self, score: Score, cache: KeyValueCache, keys: Tensor, at: Positions) -> None:
        self.score, self.cache, self.keys, self.at = score, cache, keys, at
        last = at.query[..., -1] // score.spec.block[1]
        self.live: set[int] = set(last.reshape(-1).tolist())

    def rotated(self, upto: int, block: int) -> Float[Tensor, "b g s wide"]:
        """The first `upto` keys for the rows of a block."""
        room = self.cache.rotated.setdefault(block, Room(2)) if block in self.live else Room(2)
        if room.used < upto:
            new = slice(room.used, upto)
            first = room.used if self.at.regular else None
            keys, places = self.keys[:, :, new], self.at.key[..., new]
            room.append(self.score.rotate_cached_keys(keys, places, block, first))
        return room.view(upto)

    def forget_others(self) -> None:
        """Drop what no later row wants."""
        for block in set(self.cache.rotated) - self.live:
            del self.cache.rotated[block]

"""One more token with a cache, for scores that can be absorbed into queries and keys.

`prepare_step` makes what serves a score up to a capacity: a rotation is a row of a table, and λ one
of a list. Scores with a distance bias, a cap, a sink or two regimes have a step as well. What is
learned is read at every token.

Legend: B batch, H query heads, G key heads, r = H/G, S keys, D head dimension, E value size, C
capacity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from normattn.kernels.numerics import at_least_float32, host_can_read, nan_for_infinite
from normattn.kernels.sdpa import flash
from normattn.layers.cache import KeyValueCache
from normattn.layers.folds import folds, learned_operands, visible_keys
from normattn.layers.prepare import regular_positions
from normattn.score import Score, ScoreSpec
from normattn.score.parts import PairBiasPart, RotaryPosition
from normattn.score.rotary import Rotation, feature_pairs, key_tables, query_scale, query_tables


@dataclass(frozen=True, eq=False)
class FoldedStep:
    """What one more token needs besides a cache, at any of the positions 0 … C − 1.

    `key` rotates keys and `query` queries; with one regime `key` rotates both in one go, and
    `scale` is λ, of every position where it depends on n. `bias` (1, G, r, C) holds b(C − 1 − c)
    from left to right where it learns nothing, `distance` (C,) these distances where it does. With
    two regimes the cache has far keys, and the last `near_window` of them at their near positions
    as well, so that a step rotates one key only. `host_reads` says that the host may look at
    values.

    In half precision new queries and keys are rounded after the rotation, the bias is in float32,
    and torch's kernel keeps scores in float32. Query heads that share a key head are rows of one
    query to it: each key is read once.
    """

    spec: ScoreSpec
    heads: tuple[int, int]
    capacity: int
    scale: list[float] | float
    n: Float[Tensor, "1 c"] | None
    query: RowRotation | None
    key: RowRotation | None
    bias: Float[Tensor, "1 g r c"] | None
    distance: Float[Tensor, " c"] | None
    near_window: int | None
    host_reads: bool

    def run(
        self,
        score: Score,
        q: Float[Tensor, "b h 1 d"],
        k: Float[Tensor, "b g 1 d"],
        v: Float[Tensor, "b g 1 e"],
        cache: KeyValueCache | None = None,
    ) -> Float[Tensor, "b h 1 e"]:
        """The token's output; its key and value join the cache."""
        assert cache is not None
        cache.claim(self.spec)
        at, shape, dtype = cache.length, q.shape, q.dtype
        q, k = learned_operands(score, q, k, None if self.n is None else self.n[:, at : at + 1])
        both = torch.cat((q, k), 1)
        if self.key is not None:
            both = self._rotated(both.float() if both.element_size() == 2 else both, at)
        both = both if both.dtype is dtype else both.to(dtype)
        diverged = self.host_reads and not math.isfinite(both.sum(dtype=torch.float32).item())
        if diverged or not self.host_reads:
            both = nan_for_infinite(both)
        q, k = both.split_with_sizes(self.heads, -3)
        attend = self._one_regime if self.near_window is None else self._two_regimes
        shared = self.heads[0] != self.heads[1]
        rows = q.reshape(*k.shape[:-2], -1, k.shape[-1]) if shared else q
        out = attend(score, rows, k, v, cache)
        if diverged:
            # torch's kernel may give 0 where all is NaN.
            spoilt = (q + k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)).isnan().any(-1)
            out = out.masked_fill(spoilt.view(-1, *out.shape[:3]).any(0)[..., None], math.nan)
        return out.reshape(*shape[:3], -1) if shared else out

    def _rotated(self, both: Float[Tensor, "b hg 1 d"], at: int) -> Float[Tensor, "*n b hg 1 d"]:
        """Queries and keys at their position; of two regimes (2, B, H + G, 1, D), near and far."""
        assert self.key is not None
        partners = both.take(self.key.partner)
        if self.query is None:
            return self.key(both, partners, at)
        (q, k), (q_other, k_other) = (x.split_with_sizes(self.heads, 1) for x in (both, partners))
        return torch.cat((self.query(q, q_other, at), self.key(k, k_other, at)), 2)

    def _one_regime(
        self,
        score: Score,
        q: Float[Tensor, "b g r d"],
        k: Float[Tensor, "b g 1 d"],
        v: Float[Tensor, "b g 1 e"],
        cache: KeyValueCache,
    ) -> Float[Tensor, "b g r e"]:
        """The rows' outputs over all keys that the cache then holds, or those of the window."""
        scale = self.scale if isinstance(self.scale, float) else self.scale[cache.length]
        keys, values = cache.append(k, v)
        window, cap = self.spec.window[0], self.spec.cap
        if window is not None and keys.shape[2] > window:
            keys, values = keys[:, :, -window:], values[:, :, -window:]
        bias = self._biases(score, keys.shape[2])
        if cap is None and values.shape[-1] == q.shape[-1]:
            if score.sink is not None:
                return _with_sink(score.sink, *flash(q, keys, values, False, bias, scale))
            return scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=scale)
        # torch's kernel has no cap, and copies values of another size.
        wide = at_least_float32(q.dtype)
        products = (q.to(wide) * scale) @ keys.to(wide).mT
        if cap is not None:
            products = torch.tanh(products / cap.cap) * cap.cap
        if bias is not None:
            products = products + bias
        return (torch.softmax(products, -1) @ values.to(wide)).to(q.dtype)

    def _two_regimes(
        self,
        score: Score,
        q: Float[Tensor, "2 b g r d"],
        k: Float[Tensor, "2 b g 1 d"],
        v: Float[Tensor, "b g 1 e"],
        cache: KeyValueCache,
    ) -> Float[Tensor, "b g r e"]:
        """Near and far keys apart: near scores are ⟨R_i q, R_j k⟩ whatever i is."""
        assert self.near_window is not None
        at, (near_q, far_q), (near_k, far_k) = cache.length, q.unbind(), k.unbind()
        keys, values = cache.append(far_k, v)

        def rotated(first: int, last: int) -> Tensor:
            if first == at:
                return near_k
            # The cache was filled or cut by other calls: the window is rotated once.
            places = torch.arange(first, last, device=keys.device)
            given = self.spec, keys.shape[-1], places, keys.dtype, first
            turn = key_tables(*given, far_to_near=True).near
            assert turn is not None
            turned: Tensor = turn(keys[:, :, first:last])
            return turned

        far, bias = max(0, at + 1 - self.near_window), self._biases(score, at + 1)
        near_bias, far_bias = (None, None) if bias is None else (bias[..., far:], bias[..., :far])
        near = cache.rotated("near", far, at + 1, rotated)
        out, lse = flash(near_q, near, values[:, :, far:], False, near_bias)
        if far:
            rest = flash(far_q, keys[:, :, :far], values[:, :, :far], False, far_bias)
            share = torch.sigmoid(rest[1] - lse)[..., None]
            out, lse = torch.lerp(out, rest[0], share.to(out.dtype)), torch.logaddexp(lse, rest[1])
        return out if score.sink is None else _with_sink(score.sink, out, lse)

    def _biases(self, score: Score, keys: int) -> Float[Tensor, "1 g r s"] | None:
        """b(h, r) of the last `keys` keys."""
        if self.distance is not None and score.bias is not None and self.spec.bias is not None:
            distance = self.distance[self.capacity - keys :]
            bias = self.spec.bias.values(distance, score.heads, dict(score.bias.items()))
            return bias.view(1, self.heads[1], -1, keys)
        return None if self.bias is None else self.bias[..., self.capacity - keys :]


def _with_sink(
    sink: Float[Tensor, " h"], out: Float[Tensor, "b g r e"], lse: Float[Tensor, "b g r"]
) -> Float[Tensor, "b g r e"]:
    """The output with exp(sink) in the denominator of each head's softmax."""
    share = torch.sigmoid(lse - sink.view(lse.shape[1:]).to(lse.dtype))
    return (out * share[..., None]).to(out.dtype)


@dataclass(frozen=True, eq=False)
class RowRotation:
    """Rotations by a row of a table: feature f becomes x_f·cos + x_partner(f)·sin.

    cos and sin are (C, D), or (C, 2, 1, 1, 1, D) for a near and a far position. `partner` is the
    place of each feature's partner among all numbers of x.
    """

    cos: Float[Tensor, "c *n d"]
    sin: Float[Tensor, "c *n d"]
    partner: Int[Tensor, "b hg 1 d"]

    def __call__(self, x: Tensor, partners: Tensor, at: int) -> Tensor:
        """x at a position."""
        return torch.addcmul(x * self.cos[at], partners, self.sin[at])


def prepare_step(score: Score, q: Tensor, k: Tensor, v: Tensor, capacity: int) -> FoldedStep | None:
    """For a token with a cache that holds fewer than `capacity` others; None without a step."""
    if not _steps(score, q, v):
        return None
    spec, size, remapping = score.spec, score.head_dim, score.spec.remapping
    batch, heads, groups = len(q), q.shape[1], k.shape[1]
    with torch.inference_mode(False):
        at = regular_positions(capacity, capacity, q.device)
        scale, *tables = _shared_tables(spec, size, capacity, q.dtype, q.device)
        rows = torch.arange(batch * (heads + groups), device=q.device)[:, None] * size
        query, key = (
            None if x is None else RowRotation(x[0], x[1], (rows + x[2]).view(batch, -1, 1, size))
            for x in tables
        )
        bias = distance = None
        if spec.bias is not None:
            distance = at.key.to(at_least_float32(q.dtype)).flip(-1)
            if score.bias is None:
                bias, distance = spec.bias.values(distance, score.heads, {}), None
                bias = bias.view(1, groups, -1, capacity)
        return FoldedStep(
            *(spec, (heads, groups), capacity, scale),
            n=visible_keys(score, at.n, q),
            query=query,
            key=key,
            bias=bias,
            distance=distance,
            near_window=None if remapping is None else remapping.window,
            host_reads=host_can_read(q),
        )


RowTables = tuple[Tensor, Tensor, Tensor]
"""cos and sin as in `RowRotation`, and the partner of each of D features."""


@lru_cache(maxsize=32)
def _shared_tables(
    spec: ScoreSpec, size: int, capacity: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[float] | float, RowTables | None, RowTables | None]:
    """λ, and the tables of queries, where they have their own, and of keys; for every layer."""
    at = regular_positions(capacity, capacity, device)
    keys = key_tables(spec, size, at.key, dtype, 0)
    key = _by_feature(keys.near, keys.far, size)
    if spec.remapping is None:
        scale = query_scale(spec, size, at.n)
        return (scale.tolist() if isinstance(scale, Tensor) else float(scale)), None, key
    # With two regimes λ is in the rotation of queries.
    queries = query_tables(spec, size, at, dtype)
    return 1.0, _by_feature(queries.near, queries.far, size), key


def _by_feature(near: object, far: object, size: int) -> RowTables | None:
    """The table of a near rotation and, if there is one, a far one, feature by feature."""
    tables = []
    for turn in (near, far):
        if not isinstance(turn, Rotation):
            continue
        first, second = feature_pairs(turn.start, turn.cos.shape[-1], turn.interleaved)
        cos = turn.rest.expand(-1, size).clone()
        sin, partner = torch.zeros_like(cos), torch.arange(size, device=cos.device)
        cos[:, first], cos[:, second] = turn.cos, turn.cos
        sin[:, first], sin[:, second] = -turn.sin, turn.sin
        partner[first], partner[second] = partner[second].clone(), partner[first].clone()
        tables.append((cos, sin, partner))
    if not tables:
        return None
    (cos, sin, partner), *others = tables
    for far_cos, far_sin, _ in others:
        cos, sin = torch.stack((cos, far_cos), 1), torch.stack((sin, far_sin), 1)
        cos, sin = cos[:, :, None, None, None], sin[:, :, None, None, None]
    return cos, sin, partner


def _steps(score: Score, q: Tensor, v: Tensor) -> bool:
    """Whether a `FoldedStep` supports a score: biases by distance, a cap and a sink are allowed.

    Not where whole rows of scores are read, nor where queries and keys rotate apart (XPos), nor
    what needs the log-sum-exp of torch's kernel where that has none.
    """
    spec, elsewhere = score.spec, not q.is_cpu
    apart = isinstance(spec.position, RotaryPosition) and spec.position.log_growth(score.head_dim)
    rows = spec.normaliser, spec.selection, apart if apart is not False else None
    plain = folds(score) and all(part is None for part in rows)
    plain = plain and not isinstance(spec.bias, PairBiasPart)
    plain = plain and (spec.remapping is None or spec.window[0] is None)
    if score.sink is not None or spec.remapping is not None:
        plain = plain and not elsewhere and spec.cap is None and v.shape[-1] == q.shape[-1]
    # Only a CPU's kernel adds a bias in float32 to half-precision products.
    return plain and not (elsewhere and q.element_size() == 2 and spec.bias is not None)

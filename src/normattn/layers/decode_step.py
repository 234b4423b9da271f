"""One more token beside a cache, under scores that fold into queries and keys.

`find_step` gives what was prepared for a score and a capacity: a rotation is a row of a table, and
λ one of a list. Scores with a distance bias, a cap, a sink or two regimes have a step as well. What
is learned is read at every token.

Legend: B batch, H query heads, G key heads, S keys, D head dimension, E value size, C capacity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from normattn.kernels.inputs import check_shapes
from normattn.kernels.numerics import host_can_read, nan_for_infinite
from normattn.layers.cache import KeyValueCache
from normattn.layers.checks import check_heads
from normattn.layers.folds import (
    folds,
    normed,
    output_is_final,
    times_learned_length,
    visible_keys,
    without_parameters,
)
from normattn.layers.prepare import regular_positions
from normattn.score import Score, ScoreSpec
from normattn.score.parts import PairBiasPart, RotaryPosition
from normattn.score.rotary import Rotation, feature_pairs, key_tables, query_scale, query_tables

# Steps live as long as a cache uses them; the layers of a model share one.
_STEPS: WeakValueDictionary[tuple[object, ...], FoldedStep] = WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class FoldedStep:
    """What one more token needs beside a cache, at any of the positions 0 … C − 1.

    `key` rotates keys and `query` queries; with one regime `key` rotates both in one go, and
    `scale` is λ, of every position where it depends on n. `bias` (H, C) holds b(C − 1 − r) from
    left to right where it learns nothing, `distance` (C,) these distances where it does. With two
    regimes the cache has far keys, and the last `near_window` of them at their near positions as
    well, so that a step rotates one key only. `output_is_final` says that no gate and no pairs of
    heads follow, `host_reads` that the host may look at values.
    """

    score: Score | None
    spec: ScoreSpec
    shapes: tuple[torch.Size, torch.Size, torch.Size]
    dtype: torch.dtype
    heads: tuple[int, int]
    capacity: int
    output_is_final: bool
    scale: list[float] | float
    n: Float[Tensor, "1 c"] | None
    query: RowRotation | None
    key: RowRotation | None
    bias: Float[Tensor, "h c"] | None
    distance: Float[Tensor, " c"] | None
    near_window: int | None
    host_reads: bool

    def fits(self, q: Tensor, k: Tensor, v: Tensor, cache: KeyValueCache) -> bool:
        """Whether it serves this token too, whose tensors then are what was checked before."""
        return (
            cache.length < self.capacity
            and (q.shape, k.shape, v.shape) == self.shapes
            and q.dtype is k.dtype is v.dtype is self.dtype
            and q.layout is k.layout is v.layout is torch.strided
        )

    def run(
        self,
        score: Score | None,
        q: Float[Tensor, "b h 1 d"],
        k: Float[Tensor, "b g 1 d"],
        v: Float[Tensor, "b g 1 e"],
        cache: KeyValueCache | None = None,
    ) -> Float[Tensor, "b h 1 e"]:
        """The token's output; its key and value join the cache."""
        assert score is not None
        assert cache is not None
        cache.claim(self.spec)
        at, heads, wanted = cache.length, self.heads, k.requires_grad
        q, k = normed(score, q, k)
        both = torch.cat((q, k), 1)
        diverged = self.host_reads and not math.isfinite(both.sum(dtype=torch.float32).item())
        if diverged or not self.host_reads:
            both = nan_for_infinite(both)
        partners = both if self.key is None else both.index_select(-1, self.key.partner)
        if self.near_window is not None:
            return self._two_regimes(score, both, partners, v, cache)
        if self.key is not None:
            both = self.key(both, partners, at)
        q, k = both.split_with_sizes(heads, 1)
        if k.requires_grad and not wanted:
            k = k.detach()  # only the query wants a gradient
        if self.n is not None:
            q = times_learned_length(score, q, self.n[:, at : at + 1])
        learned = score._parameters.get("scale")
        if learned is None and "scale" not in score._parameters:
            learned = score.scale  # where a parametrisation or a replica keeps it
        if learned is not None:
            q = q * learned
        keys, values = cache.append(k, v)
        window = self.spec.window[0]
        if window is not None and keys.shape[2] > window:
            keys, values = keys[:, :, -window:], values[:, :, -window:]
        bias = self._biases(score, keys.shape[2])
        scale = self.scale if isinstance(self.scale, float) else self.scale[at]
        manual = self.spec.cap is not None or score.sink is not None
        # In a step over shared key heads plain products win, as the rule of `dispatch` has it.
        manual = manual or (heads[0] != heads[1] and keys.shape[2] >= 2048)
        if manual or diverged or v.shape[-1] != q.shape[-1]:
            # torch's kernel copies values of another size, and may give 0 where all is NaN.
            return self._weigh(score, _products(q * scale, keys), bias, values)
        return scaled_dot_product_attention(
            q, keys, values, attn_mask=bias, scale=scale, enable_gqa=heads[0] != heads[1]
        )

    def _two_regimes(
        self, score: Score, both: Tensor, partners: Tensor, v: Tensor, cache: KeyValueCache
    ) -> Float[Tensor, "b h 1 e"]:
        """Near and far scores beside each other: near ones are ⟨R_i q, R_j k⟩ whatever i is."""
        assert self.near_window is not None
        assert self.query is not None
        assert self.key is not None
        at = cache.length
        (q, k), (q_other, k_other) = (x.split_with_sizes(self.heads, 1) for x in (both, partners))
        q = self.query(q, q_other, at)
        if self.n is not None:
            q = times_learned_length(score, q, self.n[:, at : at + 1])
        near_q, far_q = (q if score.scale is None else q * score.scale).unbind()
        near_k, far_k = self.key(k, k_other, at).unbind()
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

        far = max(0, at + 1 - self.near_window)
        products = _products(near_q, cache.rotated("near", far, at + 1, rotated))
        if far:
            products = torch.cat((_products(far_q, keys[:, :, :far]), products), -1)
        return self._weigh(score, products, self._biases(score, at + 1), values)

    def _biases(self, score: Score, keys: int) -> Float[Tensor, "*b h 1 s"] | None:
        """b(h, r) of the last `keys` keys."""
        if self.distance is not None and score.bias is not None and self.spec.bias is not None:
            distance = self.distance[self.capacity - keys :]
            bias = self.spec.bias.values(distance, score.heads, dict(score.bias.items()))
            return bias[None, :, None]
        return None if self.bias is None else self.bias[None, :, None, self.capacity - keys :]

    def _weigh(
        self,
        score: Score,
        products: Float[Tensor, "b h 1 s"],
        bias: Float[Tensor, "*b h 1 s"] | None,
        values: Float[Tensor, "b g s e"],
    ) -> Float[Tensor, "b h 1 e"]:
        """softmax(cap·tanh(products/cap) + bias) · v, with a sink's logit in the denominator."""
        cap, keys = self.spec.cap, products.shape[-1]
        if cap is not None:
            products = torch.tanh(products / cap.cap) * cap.cap
        if bias is not None:
            products = products + bias
        if score.sink is not None:
            sink = score.sink.to(products.dtype)[None, :, None, None]
            products = torch.cat((products, sink.expand(*products.shape[:3], 1)), -1)
        weights = torch.softmax(products, -1)[..., :keys]
        rows = weights.reshape(values.shape[0], values.shape[1], -1, keys)
        out: Tensor = rows @ values
        return out.reshape(*products.shape[:3], -1)


@dataclass(frozen=True, eq=False)
class RowRotation:
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
    def of(near: object, far: object, dtype: torch.dtype, size: int) -> RowRotation | None:
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
            tables.append((cos.to(dtype), sin.to(dtype), partner))
        if len(tables) < 2:
            return RowRotation(*tables[0]) if tables else None
        both = (torch.stack((tables[0][n], tables[1][n]), 1) for n in (0, 1))
        cos, sin = (x[:, :, None, None, None] for x in both)
        return RowRotation(cos, sin, tables[0][2])


def find_step(
    score: Score | ScoreSpec | str, q: Tensor, k: Tensor, v: Tensor, cache: KeyValueCache
) -> FoldedStep | None:
    """What was prepared for one more token beside this cache, made when it is first needed.

    None for several tokens, and for a score that asks for more. Raises `InputError` for tensors
    that do not fit.
    """
    if q.shape[2] != 1 or k.shape[2] != 1:
        return None
    given = score._spec if isinstance(score, Score) else score
    held, step = cache.step
    if held is not given or not isinstance(step, FoldedStep) or not step.fits(q, k, v, cache):
        step = _shared_step(score, q, k, v, cache)
        cache.step = given, step
    return step


@torch.no_grad()
def _shared_step(
    score: Score | ScoreSpec | str, q: Tensor, k: Tensor, v: Tensor, cache: KeyValueCache
) -> FoldedStep | None:
    """The step of a cache of this length, or twice as long, for all caches of equal scores."""
    check_shapes(q, k, v)
    module = score if isinstance(score, Score) else without_parameters(score, q, k)
    check_heads(module, q, k)
    if not _steps(module, q):
        return None
    capacity = max(64, 1 << cache.length.bit_length())
    name = (
        *(score if isinstance(score, str) else module.spec, isinstance(score, Score)),
        *(q.shape, k.shape, v.shape, q.dtype, q.device, capacity),
    )
    step = _STEPS.get(name)
    if step is None:
        built = None if isinstance(score, Score) else module
        step = _STEPS[name] = _prepare_step(module, built, q, k, v, capacity)
    return step


def _prepare_step(
    score: Score,
    built: Score | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    capacity: int,
) -> FoldedStep:
    """For a token beside a cache that holds fewer than `capacity` others."""
    spec, size, remapping = score.spec, score.head_dim, score.spec.remapping
    with torch.inference_mode(False):
        at = regular_positions(capacity, capacity, q.device)
        keys, queries = key_tables(spec, size, at.key, q.dtype, 0), None
        # With two regimes λ is in the rotation of queries.
        scale = query_scale(spec, size, at.n) if remapping is None else 1.0
        if remapping is not None:
            queries = query_tables(spec, size, at, q.dtype)
        bias = distance = None
        if spec.bias is not None:
            distance = at.key.to(q.dtype).flip(-1)
            if score.bias is None:
                bias, distance = spec.bias.values(distance, score.heads, {}).to(q.dtype), None
        return FoldedStep(
            *(built, spec, (q.shape, k.shape, v.shape), q.dtype),
            *((q.shape[1], k.shape[1]), capacity, output_is_final(spec)),
            scale.tolist() if isinstance(scale, Tensor) else float(scale),
            visible_keys(score, at.n, q),
            None if queries is None else RowRotation.of(queries.near, queries.far, q.dtype, size),
            RowRotation.of(keys.near, keys.far, q.dtype, size),
            *(bias, distance, None if remapping is None else remapping.window),
            host_can_read(q),
        )


def _steps(score: Score, q: Tensor) -> bool:
    """Whether a `FoldedStep` serves a score: biases of the distance, a cap and a sink stand beside.

    Not where whole rows of scores are read, nor where queries and keys rotate apart (XPos).
    """
    spec = score.spec
    apart = isinstance(spec.position, RotaryPosition) and spec.position.log_growth(score.head_dim)
    rows = spec.normaliser, spec.selection, apart if apart is not False else None
    plain = folds(score) and all(part is None for part in rows)
    plain = plain and not isinstance(spec.bias, PairBiasPart) and spec.documents is None
    plain = plain and (spec.remapping is None or spec.window[0] is None)
    return plain and q.dtype in (torch.float32, torch.float64)


def _products(q: Float[Tensor, "b h 1 d"], keys: Float[Tensor, "b g s d"]) -> Tensor:
    """⟨q, k⟩ (B, H, 1, S); query heads that share a key head are rows of one product."""
    rows = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[-1])
    return (rows @ keys.transpose(-1, -2)).reshape(*q.shape[:3], -1)

"""One more token beside a cache, under scores that fold into queries and keys.

`find_step` gives what was prepared for a score and a capacity: a rotation is a row of a table, and
λ one of a list. Scores with a distance bias, a cap, a sink or two regimes have a step as well. What
is learned is read at every token.

Legend: B batch, H query heads, G key heads, r = H/G, S keys, D head dimension, E value size, C
capacity.
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
from normattn.kernels.numerics import (
    at_least_float32,
    host_can_read,
    nan_for_infinite,
)
from normattn.kernels.sdpa import flash
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
    `scale` is λ, of every position where it depends on n. `bias` (1, G, r, C) holds b(C − 1 − c)
    from left to right where it learns nothing, `distance` (C,) these distances where it does. With
    two regimes the cache has far keys, and the last `near_window` of them at their near positions
    as well, so that a step rotates one key only. `output_is_final` says that no gate and no pairs
    of heads follow, `host_reads` that the host may look at values.

    In half precision new queries and keys are rounded after the rotation, the bias is in float32,
    and torch's kernel keeps scores in float32. Query heads that share a key head are rows of one
    query to it: each key is read once.
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
    bias: Float[Tensor, "1 g r c"] | None
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
        at = cache.length
        q, k = normed(score, q, k)
        both = torch.cat((q, k), 1)
        if self.key is not None:
            wide = both.float() if both.element_size() == 2 else both
            both = self._rotated(wide, at)
            both = both if wide.dtype is self.dtype else both.to(self.dtype)
        diverged = self.host_reads and not math.isfinite(both.sum(dtype=torch.float32).item())
        if diverged or not self.host_reads:
            both = nan_for_infinite(both)
        q, k = both.split_with_sizes(self.heads, -3)
        if self.n is not None:
            q = times_learned_length(score, q, self.n[:, at : at + 1])
        learned = score._parameters.get("scale")
        if learned is None and "scale" not in score._parameters:
            learned = score.scale  # where a parametrisation or a replica keeps it
        if learned is not None:
            q = q * learned
        attend = self._one_regime if self.near_window is None else self._two_regimes
        shared = self.heads[0] != self.heads[1]
        rows = q.reshape(*k.shape[:-2], -1, k.shape[-1]) if shared else q
        out = attend(score, rows, k, v, cache)
        if diverged:
            # torch's kernel may give 0 where all is NaN.
            spoilt = (q + k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)).isnan().any(-1)
            out = out.masked_fill(spoilt.view(-1, *out.shape[:3]).any(0)[..., None], math.nan)
        return out.reshape(*self.shapes[0][:3], -1) if shared else out

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

    @staticmethod
    def of(near: object, far: object, shape: tuple[int, ...]) -> RowRotation | None:
        """The table of a near rotation and, if there is one, a far one, feature by feature."""
        tables, size = [], shape[-1]
        for turn in (near, far):
            if not isinstance(turn, Rotation):
                continue
            first, second = feature_pairs(turn.start, turn.cos.shape[-1], turn.interleaved)
            cos = turn.rest.expand(-1, size).clone()
            sin, partner = torch.zeros_like(cos), torch.arange(size, device=cos.device)
            cos[:, first], cos[:, second] = turn.cos, turn.cos
            sin[:, first], sin[:, second] = -turn.sin, turn.sin
            partner[first], partner[second] = partner[second].clone(), partner[first].clone()
            tables.append((cos, sin))
        if not tables:
            return None
        rows = torch.arange(math.prod(shape[:-1]), device=partner.device)[:, None] * size
        cos, sin = tables[0]
        if len(tables) == 2:
            both = (torch.stack(sides, 1) for sides in zip(*tables, strict=True))
            cos, sin = (x[:, :, None, None, None] for x in both)
        return RowRotation(cos, sin, (rows + partner).view(shape))


def find_step(
    score: Score | ScoreSpec | str, q: Tensor, k: Tensor, v: Tensor, cache: KeyValueCache
) -> FoldedStep | None:
    """What was prepared for one more token beside this cache, made when it is first needed.

    None for several tokens, where a gradient is wanted, and for a score that asks for more. Raises
    `InputError` for tensors that do not fit.
    """
    if q.shape[2] != 1 or k.shape[2] != 1 or _learning(score, q, k, v):
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
    if not _steps(module, q, v):
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
    shape = len(q), q.shape[1] + k.shape[1], 1, size
    with torch.inference_mode(False):
        at = regular_positions(capacity, capacity, q.device)
        keys, queries = key_tables(spec, size, at.key, q.dtype, 0), None
        # With two regimes λ is in the rotation of queries.
        scale = query_scale(spec, size, at.n) if remapping is None else 1.0
        if remapping is not None:
            queries = query_tables(spec, size, at, q.dtype)
        bias = distance = None
        if spec.bias is not None:
            distance = at.key.to(at_least_float32(q.dtype)).flip(-1)
            if score.bias is None:
                bias, distance = spec.bias.values(distance, score.heads, {}), None
                bias = bias.view(1, k.shape[1], -1, capacity)
        return FoldedStep(
            *(built, spec, (q.shape, k.shape, v.shape), q.dtype),
            *((q.shape[1], k.shape[1]), capacity, output_is_final(spec)),
            scale.tolist() if isinstance(scale, Tensor) else float(scale),
            visible_keys(score, at.n, q),
            None if queries is None else RowRotation.of(queries.near, queries.far, shape),
            RowRotation.of(keys.near, keys.far, shape),
            *(bias, distance, None if remapping is None else remapping.window),
            host_can_read(q),
        )


def _steps(score: Score, q: Tensor, v: Tensor) -> bool:
    """Whether a `FoldedStep` serves a score: biases by distance, a cap and a sink are allowed.

    Not where whole rows of scores are read, nor where queries and keys rotate apart (XPos), nor
    what needs the log-sum-exp of torch's kernel where that has none.
    """
    spec, elsewhere = score.spec, not q.is_cpu
    apart = isinstance(spec.position, RotaryPosition) and spec.position.log_growth(score.head_dim)
    rows = spec.normaliser, spec.selection, apart if apart is not False else None
    plain = folds(score) and all(part is None for part in rows)
    plain = plain and not isinstance(spec.bias, PairBiasPart) and spec.documents is None
    plain = plain and (spec.remapping is None or spec.window[0] is None)
    if score.sink is not None or spec.remapping is not None:
        plain = plain and not elsewhere and spec.cap is None and v.shape[-1] == q.shape[-1]
    # Only a CPU's kernel adds a bias in float32 to half-precision products.
    return plain and not (elsewhere and q.element_size() == 2 and spec.bias is not None)


def _learning(score: Score | ScoreSpec | str, *tensors: Tensor) -> bool:
    """Whether a gradient is wanted, which the general way gives."""
    if not torch.is_grad_enabled():
        return False
    learned = score.parameters() if isinstance(score, Score) else ()
    return any(x.requires_grad for x in (*tensors, *learned))

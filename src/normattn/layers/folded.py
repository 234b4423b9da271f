"""Plans of scores that fold into queries and keys: whole sequences, and one more token.

Nothing but a norm, a rotation and λ is done to queries and keys of a sequence. One more token may
have a distance bias, a window, a cap and a sink as well. Tables are made once for a score and
shapes, so that a small call costs its operations alone; what is learned is read in each call.

Legend: B batch, H query heads, G key heads, r = H/G, T queries, S keys, D head dimension, E value
size, C capacity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from normattn.kernels import AttentionInputs, AttentionMask, attend, choose
from normattn.kernels.numerics import at_least_float32, host_can_read, nan_for_infinite
from normattn.kernels.sdpa import flash, sdpa
from normattn.layers.cache import KeyValueCache
from normattn.layers.checks import AttentionArguments
from normattn.layers.gates import finish, pair_values
from normattn.score import Positions, Score, ScoreSpec
from normattn.score.parts import PairBiasPart, RotaryPosition, VORoPE
from normattn.score.rotary import (
    Rotation,
    RotationArguments,
    feature_pairs,
    key_tables,
    query_scale,
    query_tables,
    rotate_rows,
    rotate_with_gradient,
    scaled,
)


def folds(score: Score) -> bool:
    """Whether nothing but a norm, a rotation and λ is done to queries and keys."""
    spec = score.spec
    wider = getattr(spec.position, "widens", False) or spec.forgets or spec.residual is not None
    moved = spec.order is not None or spec.blockwise or spec.chunk is not None
    moved = moved or spec.documents is not None or isinstance(spec.values, VORoPE)
    return not (score.position is not None or wider or moved or spec.leaks_future)


@dataclass(frozen=True, eq=False)
class FoldedPlan:
    """What turns queries and keys of some shapes into operands of torch's kernel.

    `complete` says that no gate, no pairs of heads and no part of the values follow. `n` (1, C)
    is the number of visible keys, where a learned part of λ depends on it.
    """

    complete: bool
    n: Float[Tensor, "1 c"] | None

    def operands(
        self, score: Score, q: Tensor, k: Tensor, rows: slice | None = None
    ) -> tuple[Float[Tensor, "b h t d"], Float[Tensor, "b g t d"]]:
        """Queries and keys after their norms, the queries times what λ learns."""
        # Not by attribute, which is a call of Python each.
        query_norm, key_norm = score._modules.get("query_norm"), score._modules.get("key_norm")
        if query_norm is not None:
            q = query_norm.apply_directly(q)  # type: ignore[operator]
        if key_norm is not None:
            k = key_norm.apply_directly(k)  # type: ignore[operator]
        if self.n is not None and score.logn is not None and score.spec.logn is not None:
            n = self.n if rows is None else self.n[:, rows]
            factor = score.spec.logn.learned_factor(n, dict(score.logn.items()))
            q = scaled(q, factor[..., None])
        learned = score._parameters.get("scale")
        if learned is None and "scale" not in score._parameters:
            learned = score.scale  # where a parametrisation or a replica keeps it
        return (q if learned is None else q * learned), k


@dataclass(frozen=True, eq=False)
class FoldedSequence(FoldedPlan):
    """Queries and keys of whole sequences.

    `query` are the arguments that rotate queries and multiply them by λ, `key` those that rotate
    keys; None where nothing rotates. `scale` is then λ, a number for all rows or one for each.
    `mask` and `backend` are for numbers that torch's kernel does not serve.
    """

    query: RotationArguments | None
    key: RotationArguments | None
    scale: Tensor | float | None
    mask: AttentionMask
    backend: str

    def run(
        self,
        score: Score,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g s d"],
        v: Float[Tensor, "b g s e"],
        given: AttentionArguments,
        cache: KeyValueCache | None,
    ) -> Float[Tensor, "b outputs t out"]:
        """Norm, rotation and torch's kernel.

        Non-finite numbers stay visible. On a CPU a sum is read, and other kernels take over. On
        another device rows of the batch that hold such a number become NaN, without a wait.
        """
        v = v if self.complete else pair_values(score.spec, v, k.shape[-1])
        q, k = self.operands(score, q, k)
        if self.query is not None and self.key is not None:
            rotate = rotate_with_gradient if torch.is_grad_enabled() else rotate_rows
            q, k = rotate(q, *self.query), rotate(k, *self.key)
        elif isinstance(self.scale, Tensor):
            q = scaled(q, self.scale)
        elif self.scale is not None:
            q = q * self.scale  # as for a number for each row: equal numbers give equal bits
        if not q.is_cpu:
            out = sdpa(q, k, v, self.mask.causal, 1.0) + zero_or_nan(q, k).to(v.dtype)
        else:
            # In float32: a sum of half-precision numbers soon exceeds their range.
            total = q.detach().sum(dtype=torch.float32) + k.detach().sum(dtype=torch.float32)
            if math.isfinite(total.item()):
                out = sdpa(q, k, v, self.mask.causal, 1.0)
            else:
                out = attend(AttentionInputs(q, k, v, self.mask), self.backend)
        return out if self.complete else finish(score, out, v, None, given.gate)


def fold_sequence(
    score: Score, q: Tensor, k: Tensor, v: Tensor, at: Positions, mask: AttentionMask, backend: str
) -> FoldedSequence | None:
    """The plan of sequences like these; None where torch's kernel does not serve them."""
    spec, size = score.spec, score.head_dim
    if backend not in ("auto", "fused") or spec.remapping is not None or not folds(score):
        return None
    inputs = score(q, k, pair_values(spec, v, size), at, mask)
    if choose(inputs, backend).name != "fused" or not inputs.mask.only_causal:
        return None
    query, key = query_tables(spec, size, at, q.dtype), key_tables(spec, size, at.key, k.dtype, 0)
    assert isinstance(query.near, Rotation | None)
    assert isinstance(key.near, Rotation | None)
    turn_q, turn_k = (None if turn is None else turn.arguments for turn in (query.near, key.near))
    n = _learned_n(score, at.n, q)
    return FoldedSequence(_complete(spec), n, turn_q, turn_k, query.scale, mask, backend)


def zero_or_nan(q: Tensor, k: Tensor) -> Float[Tensor, "b 1 1 1"]:
    """0 for each row of the batch, or NaN where a query or a key is not finite; on the device."""
    if not q.numel() or not k.numel():
        return q.new_zeros(())
    largest = [torch.linalg.vector_norm(x.detach(), torch.inf, (1, 2, 3)) for x in (q, k)]
    zero: Tensor = (largest[0] + largest[1]) * 0.0
    return zero[:, None, None, None]


def _complete(spec: ScoreSpec) -> bool:
    return spec.gate is None and spec.difference is None and spec.values is None


def _learned_n(score: Score, n: Tensor, q: Tensor) -> Float[Tensor, "1 c"] | None:
    """n in float32 or wider, where something that is learned depends on it."""
    if score.logn is None or score.spec.logn is None:
        return None
    # An ordinary tensor even when first asked for in inference mode: training reuses it.
    with torch.inference_mode(False):
        return n.to(at_least_float32(q.dtype))[None].clone()


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


@dataclass(frozen=True, eq=False)
class FoldedStep(FoldedPlan):
    """One more token with a cache, at any of the positions 0 … C − 1.

    A rotation is a row of a table, and λ one of a list. Scores with a distance bias, a cap, a sink
    or two regimes have a step as well. `key` rotates keys and `query` queries; with one regime
    `key` rotates both in one go, and `scale` is λ, of every position where it depends on n.
    `distance` (C,) are C − 1 … 0 where there is a bias, and `bias` (1, G, r, C) theirs where it
    learns nothing. `window` hides older keys; with two regimes they are far: the cache has far
    keys, and the last of them at their near positions as well, so that a step rotates one key only.

    In half precision new queries and keys are rounded after the rotation, the bias is in float32,
    and torch's kernel keeps scores in float32. Query heads that share a key head are rows of one
    query to it: each key is read once.
    """

    spec: ScoreSpec
    heads: tuple[int, int]
    capacity: int
    scale: list[float] | float
    query: RowRotation | None
    key: RowRotation | None
    distance: Float[Tensor, " c"] | None
    bias: Float[Tensor, "1 g r c"] | None
    window: int | None
    two_regimes: bool
    host_reads: bool

    def run(
        self,
        score: Score,
        q: Float[Tensor, "b h 1 d"],
        k: Float[Tensor, "b g 1 d"],
        v: Float[Tensor, "b g 1 e"],
        given: AttentionArguments,
        cache: KeyValueCache | None,
    ) -> Float[Tensor, "b outputs 1 out"]:
        """The token's output; its key and value join the cache."""
        assert cache is not None
        cache.claim(self.spec)
        v = v if self.complete else pair_values(score.spec, v, k.shape[-1])
        at, shape, dtype = cache.length, q.shape, q.dtype
        q, k = self.operands(score, q, k, slice(at, at + 1))
        both = torch.cat((q, k), 1)
        if self.key is not None:
            both = self._rotated(both.float() if both.element_size() == 2 else both, at)
        both = both if both.dtype is dtype else both.to(dtype)
        diverged = self.host_reads and not math.isfinite(both.sum(dtype=torch.float32).item())
        if diverged or not self.host_reads:
            both = nan_for_infinite(both)
        q, k = both.split_with_sizes(self.heads, -3)
        shared = self.heads[0] != self.heads[1]
        rows = q.reshape(*k.shape[:-2], -1, k.shape[-1]) if shared else q
        out = self._over_cache(score, rows, k, v, cache)
        if diverged:
            # torch's kernel may give 0 where all is NaN.
            spoilt = (q + k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)).isnan().any(-1)
            out = out.masked_fill(spoilt.view(-1, *out.shape[:3]).any(0)[..., None], math.nan)
        out = out.reshape(*shape[:3], -1) if shared else out
        return out if self.complete else finish(score, out, v, None, given.gate)

    def _rotated(self, both: Float[Tensor, "b hg 1 d"], at: int) -> Float[Tensor, "*n b hg 1 d"]:
        """Queries and keys at their position; of two regimes (2, B, H + G, 1, D), near and far."""
        assert self.key is not None
        partners = both.take(self.key.partner)
        if self.query is None:
            return self.key(both, partners, at)
        (q, k), (q_other, k_other) = (x.split_with_sizes(self.heads, 1) for x in (both, partners))
        return torch.cat((self.query(q, q_other, at), self.key(k, k_other, at)), 2)

    def _over_cache(
        self,
        score: Score,
        q: Float[Tensor, "*n b g r d"],
        k: Float[Tensor, "*n b g 1 d"],
        v: Float[Tensor, "b g 1 e"],
        cache: KeyValueCache,
    ) -> Float[Tensor, "b g r e"]:
        """The rows' outputs over all keys that the cache then holds, or those of the window."""
        scale = self.scale if isinstance(self.scale, float) else self.scale[cache.length]
        far_q = near_k = bias = None
        if self.two_regimes:
            (q, far_q), (near_k, k) = q.unbind(), k.unbind()
        keys, values = cache.append(k, v)
        count = keys.shape[2]
        first = 0 if self.window is None else max(0, count - self.window)
        if self.distance is not None:
            columns = slice(self.capacity - count + (0 if self.two_regimes else first), None)
            bias = None if self.bias is None else self.bias[..., columns]
            if bias is None:
                bias = _bias_values(score, self.distance[columns], self.heads[1])
        near, near_values = keys, values
        if first:
            near, near_values = (x.narrow(2, first, count - first) for x in (keys, values))
        if near_k is None and score.sink is None:
            if self.spec.cap is not None or values.shape[-1] != q.shape[-1]:
                return self._written_out(q, near, near_values, bias, scale)
            return scaled_dot_product_attention(q, near, near_values, attn_mask=bias, scale=scale)
        if near_k is not None:
            near = self._near_keys(cache, keys, near_k, first)
        own = bias if bias is None or not self.two_regimes else bias[..., first:]
        out, lse = flash(q, near, near_values, False, own, scale)
        if far_q is not None and first:
            # Far scores are ⟨q, k⟩ of the far positions, whatever the distance is.
            other = None if bias is None else bias[..., :first]
            far = keys.narrow(2, 0, first), values.narrow(2, 0, first)
            rest = flash(far_q, *far, False, other)
            share = torch.sigmoid(rest[1] - lse)[..., None]
            out = torch.lerp(out, rest[0], share.to(out.dtype))
            lse = lse if score.sink is None else torch.logaddexp(lse, rest[1])
        if score.sink is None:
            return out
        # exp(sink) is in the denominator of each head's softmax.
        share = torch.sigmoid(lse - score.sink.view(lse.shape[1:]).to(lse.dtype))
        return (out * share[..., None]).to(out.dtype)

    def _near_keys(
        self, cache: KeyValueCache, keys: Tensor, new: Tensor, first: int
    ) -> Float[Tensor, "b g w d"]:
        """Keys from `first` on at their near positions, of which all but the `new` one are kept."""
        count = keys.shape[2]

        def rotated(start: int, end: int) -> Tensor:
            if start == count - 1:
                return new
            # The cache was filled or cut by other calls: the window is rotated once.
            places = torch.arange(start, end, device=keys.device)
            given = self.spec, keys.shape[-1], places, keys.dtype, start
            turn = key_tables(*given, far_to_near=True).near
            assert turn is not None
            turned: Tensor = turn(keys[:, :, start:end])
            return turned

        return cache.rotated("near", first, count, rotated)

    def _written_out(
        self, q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float
    ) -> Float[Tensor, "b g r e"]:
        """The same where torch's kernel has no cap, or would copy values of another size."""
        wide, cap = at_least_float32(q.dtype), self.spec.cap
        products = (q.to(wide) * scale) @ keys.to(wide).mT
        if cap is not None:
            products = torch.tanh(products / cap.cap) * cap.cap
        if bias is not None:
            products = products + bias
        return (torch.softmax(products, -1) @ values.to(wide)).to(q.dtype)


def fold_step(score: Score, q: Tensor, k: Tensor, v: Tensor, capacity: int) -> FoldedStep | None:
    """The plan of a token with a cache that holds fewer than `capacity` others.

    None where whole rows of scores are read, where queries and keys rotate apart (XPos), and for
    what needs the log-sum-exp of torch's kernel where that has none.
    """
    spec, size, elsewhere = score.spec, score.head_dim, not q.is_cpu
    apart = isinstance(spec.position, RotaryPosition) and spec.position.log_growth(size) is not None
    served = folds(score) and not apart and not isinstance(spec.bias, PairBiasPart)
    served = served and spec.normaliser is None and spec.selection is None
    served = served and (spec.remapping is None or spec.window[0] is None)
    if score.sink is not None or spec.remapping is not None:
        served = served and not elsewhere and spec.cap is None and v.shape[-1] == size
    # Only a CPU's kernel adds a bias in float32 to half-precision products.
    if not served or (elsewhere and q.element_size() == 2 and spec.bias is not None):
        return None
    batch, heads, groups = *q.shape[:2], k.shape[1]
    remapping, distance, bias = spec.remapping, None, None
    with torch.inference_mode(False):
        at = Positions.of(capacity, capacity, True, q.device)
        scale, *tables = _shared_tables(spec, size, capacity, q.dtype, q.device)
        rows = torch.arange(batch * (heads + groups), device=q.device)[:, None] * size
        query, key = (
            None if x is None else RowRotation(x[0], x[1], (rows + x[2]).view(batch, -1, 1, size))
            for x in tables
        )
        if spec.bias is not None:
            distance = at.key.to(at_least_float32(q.dtype)).flip(-1)
            bias = _bias_values(score, distance, groups) if score.bias is None else None
    return FoldedStep(
        *(_complete(spec), _learned_n(score, at.n, q), spec, (heads, groups), capacity, scale),
        *(query, key, distance, bias),
        window=spec.window[0] if remapping is None else remapping.window,
        two_regimes=remapping is not None,
        host_reads=host_can_read(q),
    )


def _bias_values(score: Score, distance: Tensor, groups: int) -> Float[Tensor, "1 g r s"]:
    assert score.spec.bias is not None
    learned = {} if score.bias is None else dict(score.bias.items())
    bias = score.spec.bias.values(distance, score.heads, learned)
    return bias.view(1, groups, -1, len(distance))


RowTables = tuple[Tensor, Tensor, Tensor]
"""cos and sin as in `RowRotation`, and the partner of each of D features."""


@lru_cache(maxsize=32)
def _shared_tables(
    spec: ScoreSpec, size: int, capacity: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[float] | float, RowTables | None, RowTables | None]:
    """λ, and the tables of queries, where they have their own, and of keys; for every layer."""
    at = Positions.of(capacity, capacity, True, device)
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

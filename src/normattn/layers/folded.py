"""Plans of scores that fold into queries and keys: of a whole sequence and of a decoding step.

A score folds if it only normalises, rotates and scales queries and keys. A decoding step supports a
distance bias, a window, a cap, a sink and two regimes as well. Tables are made once for each
specification and shape, so small calls cost only their tensor operations. Each call reads learned
parameters.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
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
from normattn.layers.gates import finish_output, pair_values
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


def is_foldable(score: Score) -> bool:
    """Whether queries and keys pass only a norm, a rotation and λ, in this order."""
    spec = score.spec
    absent = spec.residual, score.position, spec.chunk, spec.documents, spec.order
    if any(part is not None for part in absent) or isinstance(spec.values, VORoPE):
        return False
    more_features = getattr(spec.position, "widens", False) or spec.forgets
    return not (more_features or spec.blockwise or spec.leaks_future)


@dataclass(frozen=True, eq=False)
class FoldedPlan(ABC):
    """Prepares queries and keys of given shapes for torch's kernel.

    `post_processes`: the score has a gate, head pairs or a component of values. `num_visible`
    (1, C) is the number of visible keys n, where a learned part of λ depends on it.
    """

    post_processes: bool
    num_visible: Float[Tensor, "1 c"] | None

    def run(
        self,
        score: Score,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g t d"],
        v: Float[Tensor, "b g t e"],
        args: AttentionArguments,
        cache: KeyValueCache | None,
    ) -> Float[Tensor, "b outputs t out"]:
        """Normalise, apply the learned part of λ, attend and gate; append to the cache, if any."""
        if self.post_processes:
            v = pair_values(score.spec, v, k.shape[-1])
        # Looked up in the dictionaries, as each attribute of a module is a Python call.
        query_norm, key_norm = score._modules.get("query_norm"), score._modules.get("key_norm")
        if query_norm is not None:
            q = query_norm.apply_directly(q)  # type: ignore[operator]
        if key_norm is not None:
            k = key_norm.apply_directly(k)  # type: ignore[operator]
        if self.num_visible is not None and score.logn is not None and score.spec.logn is not None:
            n = self.num_visible
            n = n if cache is None else n[:, cache.length : cache.length + 1]
            factor = score.spec.logn.learned_factor(n, dict(score.logn.items()))
            q = scaled(q, factor[..., None])
        scale = score._parameters.get("scale")
        if scale is None and "scale" not in score._parameters:
            scale = score.scale  # Parametrisations and replicas keep it elsewhere.
        out = self.attend(score, q if scale is None else q * scale, k, v, cache)
        return finish_output(score, out, v, None, args.gate) if self.post_processes else out

    @abstractmethod
    def attend(
        self, score: Score, q: Tensor, k: Tensor, v: Tensor, cache: KeyValueCache | None
    ) -> Float[Tensor, "b h t e"]:
        """Rotate queries and keys, which are normalised, and return softmax(score) · v."""


@dataclass(frozen=True, eq=False)
class FoldedSequence(FoldedPlan):
    """Attention of a whole sequence: norm, rotation, torch's kernel.

    The rotation of queries multiplies them by λ. Where nothing rotates, `scale` is λ: one number,
    or one for each row. `mask` and `backend` are for the general kernels, which handle numbers that
    are not finite.
    """

    query_rotation: RotationArguments | None
    key_rotation: RotationArguments | None
    scale: Tensor | float | None
    mask: AttentionMask
    backend: str

    def attend(
        self, score: Score, q: Tensor, k: Tensor, v: Tensor, cache: KeyValueCache | None
    ) -> Float[Tensor, "b h t e"]:
        """Rotate, and call torch's kernel; numbers that are not finite give NaN.

        On a CPU the sum reveals them, and a general kernel takes over. On another device, where
        reading the sum would wait, batch rows that contain them become NaN.
        """
        if self.query_rotation is not None and self.key_rotation is not None:
            rotate = rotate_with_gradient if torch.is_grad_enabled() else rotate_rows
            q, k = rotate(q, *self.query_rotation), rotate(k, *self.key_rotation)
        elif isinstance(self.scale, Tensor):
            q = scaled(q, self.scale)
        elif self.scale is not None:
            # Not by the kernel: this rounds as a scale for each row does.
            q = q * self.scale
        if not q.is_cpu:
            return sdpa(q, k, v, self.mask.causal) + zero_or_nan(q, k).to(v.dtype)
        # In float32, as sums of half-precision numbers soon overflow.
        total = q.detach().sum(dtype=torch.float32) + k.detach().sum(dtype=torch.float32)
        if math.isfinite(total.item()):
            return sdpa(q, k, v, self.mask.causal)
        return attend(AttentionInputs(q, k, v, self.mask), self.backend)


def fold_sequence(
    score: Score,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Positions,
    mask: AttentionMask,
    backend: str,
) -> FoldedSequence | None:
    """Make the plan of sequences of these shapes; None if another kernel is chosen."""
    spec, size = score.spec, score.head_dim
    if backend not in ("auto", "fused") or spec.remapping is not None or not is_foldable(score):
        return None
    inputs = score(q, k, pair_values(spec, v, size), positions, mask)
    if choose(inputs, backend).name != "fused" or not inputs.mask.only_causal:
        return None
    queries = query_tables(spec, size, positions, q.dtype)
    keys = key_tables(spec, size, positions.key, k.dtype, 0)
    assert isinstance(queries.near, Rotation | None)
    assert isinstance(keys.near, Rotation | None)
    return FoldedSequence(
        _post_processes(spec),
        _num_visible(score, positions.n, q),
        None if queries.near is None else queries.near.arguments,
        None if keys.near is None else keys.near.arguments,
        queries.scale,
        mask,
        backend,
    )


def zero_or_nan(q: Tensor, k: Tensor) -> Float[Tensor, "b 1 1 1"]:
    """0 for each row of the batch, or NaN where a query or key is not finite; does not wait."""
    if not q.numel() or not k.numel():
        return q.new_zeros(())
    largest = [torch.linalg.vector_norm(x.detach(), torch.inf, (1, 2, 3)) for x in (q, k)]
    zero: Tensor = (largest[0] + largest[1]) * 0.0
    return zero[:, None, None, None]


def _post_processes(spec: ScoreSpec) -> bool:
    return spec.gate is not None or spec.difference is not None or spec.values is not None


def _num_visible(score: Score, n: Tensor, q: Tensor) -> Float[Tensor, "1 c"] | None:
    """n in float32 or wider, where a learned part of λ depends on it."""
    if score.logn is None or score.spec.logn is None:
        return None
    # An ordinary tensor even when made in inference mode, since training reuses it.
    with torch.inference_mode(False):
        return n.to(at_least_float32(q.dtype))[None].clone()


@dataclass(frozen=True, eq=False)
class RowRotation:
    """A rotation at one position: feature f becomes x_f·cos + x_partner(f)·sin.

    cos and sin are (C, D), or (C, 2, 1, 1, 1, D) for a near and a far position. `partner` holds the
    index of each feature's partner among all numbers of x.
    """

    cos: Float[Tensor, "c *n d"]
    sin: Float[Tensor, "c *n d"]
    partner: Int[Tensor, "b hg 1 d"]

    def __call__(self, x: Tensor, partners: Tensor, position: int) -> Tensor:
        """Rotate x, whose partners are given, to a position."""
        return torch.addcmul(x * self.cos[position], partners, self.sin[position])


@dataclass(frozen=True, eq=False)
class FoldedStep(FoldedPlan):
    """Attention of one more token over a cache, at any of the positions 0 … C − 1.

    With one regime `key_rotation` rotates queries and keys together, and `scale` is λ: one number,
    or one for each position. With two regimes (`spec.remapping`) queries have a separate rotation,
    which includes λ, and keys beyond `window` are far ones. The cache holds all keys at far
    positions and keys in the window at near ones too, so a step rotates only one key.

    `distances` (C,) are C − 1 … 0 for a score with a bias; `bias` (1, G, r, C) are its values where
    it learns nothing. Without two regimes `window` hides older keys.

    New queries and keys in half precision are rounded after the rotation; scores and the bias are
    in float32. Query heads that share a key head are rows of one query: each key is read once.
    """

    spec: ScoreSpec
    heads: tuple[int, int]
    capacity: int
    scale: list[float] | float
    query_rotation: RowRotation | None
    key_rotation: RowRotation | None
    distances: Float[Tensor, " c"] | None
    bias: Float[Tensor, "1 g r c"] | None
    window: int | None
    host_reads: bool

    def attend(
        self, score: Score, q: Tensor, k: Tensor, v: Tensor, cache: KeyValueCache | None
    ) -> Float[Tensor, "b h 1 e"]:
        """Rotate the new query and key, and attend over the cache; infinite numbers become NaN."""
        assert cache is not None
        cache.claim(self.spec)
        position, shape, dtype = cache.length, q.shape, q.dtype
        qk = torch.cat((q, k), 1)
        if self.key_rotation is not None:
            qk = qk.float() if qk.element_size() == 2 else qk
            partners = qk.take(self.key_rotation.partner)
            if self.query_rotation is None:
                qk = self.key_rotation(qk, partners, position)
            else:  # (2, B, H + G, 1, D): near and far
                q, k = qk.split_with_sizes(self.heads, 1)
                q_partners, k_partners = partners.split_with_sizes(self.heads, 1)
                q = self.query_rotation(q, q_partners, position)
                qk = torch.cat((q, self.key_rotation(k, k_partners, position)), 2)
        qk = qk if qk.dtype is dtype else qk.to(dtype)
        not_finite = self.host_reads and not math.isfinite(qk.sum(dtype=torch.float32).item())
        if not_finite or not self.host_reads:
            qk = nan_for_infinite(qk)
        q, k = qk.split_with_sizes(self.heads, -3)
        grouped = self.heads[0] != self.heads[1]
        rows = q.reshape(*k.shape[:-2], -1, k.shape[-1]) if grouped else q
        out = self._attend_cache(score, rows, k, v, cache)
        if not_finite:
            # torch's kernel may return 0 for a row of NaN.
            is_nan = (q + k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)).isnan().any(-1)
            out = out.masked_fill(is_nan.view(-1, *out.shape[:3]).any(0)[..., None], math.nan)
        return out.reshape(*shape[:3], -1) if grouped else out

    def _attend_cache(
        self, score: Score, q: Tensor, k: Tensor, v: Tensor, cache: KeyValueCache
    ) -> Float[Tensor, "b g r e"]:
        """Append k and v to the cache and attend to all keys that it then holds, or the window.

        q (B, G, r, D), k (B, G, 1, D); with two regimes both have a first axis of near and far.
        """
        scale = self.scale if isinstance(self.scale, float) else self.scale[cache.length]
        far_q = near_k = None
        if self.query_rotation is not None:
            (q, far_q), (near_k, k) = q.unbind(), k.unbind()
        keys, values = cache.append(k, v)
        num_keys = keys.shape[2]
        start = 0 if self.window is None else max(0, num_keys - self.window)
        bias = None
        if self.distances is not None:
            newest = slice(self.capacity - num_keys + (start if near_k is None else 0), None)
            if self.bias is None:
                bias = _bias_values(score, self.distances[newest], self.heads[1])
            else:
                bias = self.bias[..., newest]
        near, near_values = keys, values
        if start:
            near, near_values = (x.narrow(2, start, num_keys - start) for x in (keys, values))
        if near_k is None and score.sink is None:
            if self.spec.cap is not None or values.shape[-1] != q.shape[-1]:
                return self._explicit_softmax(q, near, near_values, bias, scale)
            return scaled_dot_product_attention(q, near, near_values, attn_mask=bias, scale=scale)
        near_bias = far_bias = bias
        if near_k is not None:
            near = self._near_keys(cache, keys, near_k, start)
            if bias is not None:
                far_bias, near_bias = bias[..., :start], bias[..., start:]
        out, lse = flash(q, near, near_values, False, near_bias, scale)
        if far_q is not None and start:
            far, far_values = keys.narrow(2, 0, start), values.narrow(2, 0, start)
            far_out, far_lse = flash(far_q, far, far_values, False, far_bias)
            far_share = torch.sigmoid(far_lse - lse)[..., None]
            out = torch.lerp(out, far_out, far_share.to(out.dtype))
            lse = lse if score.sink is None else torch.logaddexp(lse, far_lse)
        if score.sink is None:
            return out
        # exp(sink) is part of the denominator of each head's softmax.
        share = torch.sigmoid(lse - score.sink.view(lse.shape[1:]).to(lse.dtype))
        return (out * share[..., None]).to(out.dtype)

    def _near_keys(
        self, cache: KeyValueCache, keys: Tensor, new: Tensor, start: int
    ) -> Float[Tensor, "b g w d"]:
        """Keys from `start` on at their near positions; the cache keeps all but the `new` one."""
        num_keys = keys.shape[2]

        def rotate(first: int, last: int) -> Tensor:
            if first == num_keys - 1:
                return new
            # Another call filled or cut the cache: the window is rotated once.
            positions = torch.arange(first, last, device=keys.device)
            args = self.spec, keys.shape[-1], positions, keys.dtype, first
            rotation = key_tables(*args, far_to_near=True).near
            assert isinstance(rotation, Rotation)
            return rotation(keys[:, :, first:last])

        return cache.rotated("near", start, num_keys, rotate)

    def _explicit_softmax(
        self, q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float
    ) -> Float[Tensor, "b g r e"]:
        """Attention with a cap, which torch's kernel lacks, or values of another size than keys."""
        dtype, cap = at_least_float32(q.dtype), self.spec.cap
        logits = (q.to(dtype) * scale) @ keys.to(dtype).mT
        if cap is not None:
            logits = torch.tanh(logits / cap.cap) * cap.cap
        if bias is not None:
            logits = logits + bias
        return (torch.softmax(logits, -1) @ values.to(dtype)).to(q.dtype)


def fold_step(score: Score, q: Tensor, k: Tensor, v: Tensor, capacity: int) -> FoldedStep | None:
    """Make the plan of one new token over a cache of fewer than `capacity` tokens.

    None where a kernel needs whole rows of scores, where queries and keys rotate differently
    (XPos), and where the log-sum-exp of torch's kernel is needed and missing.
    """
    spec, size, remapping = score.spec, score.head_dim, score.spec.remapping
    position, bias_part = spec.position, spec.bias
    grows = isinstance(position, RotaryPosition) and position.log_growth(size) is not None
    supported = is_foldable(score) and not grows and not isinstance(bias_part, PairBiasPart)
    supported = supported and spec.normaliser is None and spec.selection is None
    supported = supported and (remapping is None or spec.window[0] is None)
    if score.sink is not None or remapping is not None:
        # The flash operator for CPUs returns the log-sum-exp but has no cap.
        supported = supported and q.is_cpu and spec.cap is None and v.shape[-1] == size
    # Only a CPU's kernel adds a float32 bias to half-precision products.
    if not supported or (not q.is_cpu and q.element_size() == 2 and bias_part is not None):
        return None
    batch, heads, groups = *q.shape[:2], k.shape[1]
    distances = bias = None
    with torch.inference_mode(False):
        positions = Positions.of(capacity, capacity, True, q.device)
        num_visible = _num_visible(score, positions.n, q)
        scale, *tables = _shared_tables(spec, size, capacity, q.dtype, q.device)
        rows = torch.arange(batch * (heads + groups), device=q.device)[:, None] * size
        query_rotation, key_rotation = (
            None if x is None else RowRotation(x[0], x[1], (rows + x[2]).view(batch, -1, 1, size))
            for x in tables
        )
        if bias_part is not None:
            distances = positions.key.to(at_least_float32(q.dtype)).flip(-1)
            bias = _bias_values(score, distances, groups) if score.bias is None else None
    return FoldedStep(
        *(_post_processes(spec), num_visible, spec, (heads, groups), capacity, scale),
        *(query_rotation, key_rotation, distances, bias),
        window=spec.window[0] if remapping is None else remapping.window,
        host_reads=host_can_read(q),
    )


def _bias_values(score: Score, distances: Tensor, groups: int) -> Float[Tensor, "1 g r s"]:
    assert score.spec.bias is not None
    learned = {} if score.bias is None else dict(score.bias.items())
    bias = score.spec.bias.values(distances, score.heads, learned)
    return bias.view(1, groups, -1, len(distances))


RowTables = tuple[Tensor, Tensor, Tensor]
"""cos and sin as in `RowRotation`, and the index of the partner of each of D features."""


@lru_cache(maxsize=32)
def _shared_tables(
    spec: ScoreSpec, size: int, capacity: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[float] | float, RowTables | None, RowTables | None]:
    """λ, the tables of queries if they differ, and the tables of keys; shared by all layers."""
    positions = Positions.of(capacity, capacity, True, device)
    keys = key_tables(spec, size, positions.key, dtype, 0)
    key = _feature_tables(keys.near, keys.far, size)
    if spec.remapping is None:
        scale = query_scale(spec, size, positions.n)
        return (scale.tolist() if isinstance(scale, Tensor) else float(scale)), None, key
    # With two regimes the rotation of queries includes λ.
    queries = query_tables(spec, size, positions, dtype)
    return 1.0, _feature_tables(queries.near, queries.far, size), key


def _feature_tables(near: object, far: object, size: int) -> RowTables | None:
    """cos and sin for each feature instead of each pair, of a near and maybe a far rotation."""
    tables = []
    for rotation in (near, far):
        if not isinstance(rotation, Rotation):
            continue
        first, second = feature_pairs(rotation.start, rotation.cos.shape[-1], rotation.interleaved)
        cos = rotation.unrotated.expand(-1, size).clone()
        sin, partner = torch.zeros_like(cos), torch.arange(size, device=cos.device)
        cos[:, first], cos[:, second] = rotation.cos, rotation.cos
        sin[:, first], sin[:, second] = -rotation.sin, rotation.sin
        partner[first], partner[second] = partner[second].clone(), partner[first].clone()
        tables.append((cos, sin, partner))
    if not tables:
        return None
    (cos, sin, partner), *far_tables = tables
    for far_cos, far_sin, _ in far_tables:
        cos, sin = torch.stack((cos, far_cos), 1), torch.stack((sin, far_sin), 1)
        cos, sin = cos[:, :, None, None, None], sin[:, :, None, None, None]
    return cos, sin, partner

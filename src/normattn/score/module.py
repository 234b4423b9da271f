"""`Score`: a specification with its learned parameters, which prepares q, k and v for a kernel.

Legend: B batch, H heads, G key heads, T queries, S keys, D head size, E value size, R distances.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from normattn.errors import InputError, require_sizes
from normattn.kernels import AttentionInputs, AttentionMask
from normattn.kernels.inputs import PairBias, Selection
from normattn.kernels.numerics import at_least_float32
from normattn.score.parts import DifferentialV2, PairBiasPart, RotaryPosition
from normattn.score.positions import Positions
from normattn.score.rotary import (
    ChunkedRotation,
    NormAfter,
    Rotation,
    add_head_axis,
    key_tables,
    query_scale,
    query_tables,
    scale_column,
    scaled,
)
from normattn.score.spec import ScoreSpec, as_spec


class Score(nn.Module):
    """The score of a `ScoreSpec` for H query heads and G key heads of dimension D.

    It holds the components' parameters and running statistics, if any. `use` switches
    inference-time components on and off. `spec` is the active specification, `built` the original
    one. Raises `InputError` for sizes that the score does not support, and for a layout.
    """

    def __init__(
        self, spec: ScoreSpec | str, heads: int, head_dim: int, kv_heads: int | None = None
    ) -> None:
        super().__init__()
        spec = as_spec(spec).resolve()
        self.heads, self.head_dim = heads, head_dim
        self.kv_heads = heads if kv_heads is None else kv_heads
        _check_sizes(spec, heads, self.kv_heads, head_dim)
        self.built = self._spec = spec
        query, key = spec.variant.query_norm(), spec.variant.key_norm()
        self.query_norm = query.build(heads, head_dim) if query else None
        self.key_norm = key.build(self.kv_heads, head_dim) if key else None
        base = spec.variant.learned_base(spec.train_length)
        self.scale = None if base is None else nn.Parameter(torch.tensor(float(base)))
        rotary = spec.position if isinstance(spec.position, RotaryPosition) else None
        self.position = _parameters(rotary, self.kv_heads, head_dim)
        self.logn = _parameters(spec.logn, heads, spec.train_length)
        self.bias = _parameters(spec.bias, heads, head_dim)
        self.sink = None if spec.sink is None else nn.Parameter(torch.zeros(heads))
        self.difference = _parameters(spec.difference, head_dim)

    @property
    def spec(self) -> ScoreSpec:
        """The active specification."""
        return self._spec

    def use(self, spec: ScoreSpec) -> None:
        """Make `spec` active; `InputError` if its training-time components differ."""
        spec = spec.resolve(self._spec.train_length)
        if spec.trained != self._spec.trained:
            raise InputError(
                f"a model trained as {self._spec.trained} cannot be used as {spec}: the "
                f"training-time components differ ({spec.trained})"
            )
        self._spec = spec

    def extra_repr(self) -> str:
        """The specification."""
        return str(self._spec)

    def forward(
        self,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g s _"],
        v: Float[Tensor, "b g s e"],
        positions: Positions,
        mask: AttentionMask,
        query_padding: Bool[Tensor, "b t"] | None = None,
        block: int = 0,
        dropout: float = 0.0,
        cached: bool = False,
    ) -> AttentionInputs:
        """Prepare queries, keys and values for a kernel: normalise, rotate and scale q and k.

        `mask` says which keys are visible, before the score's own window. Statistics over tokens
        ignore padding; without `query_padding` every query counts. For a blockwise score the query
        rows belong to `block`. `cached` keys come from `cache_keys`, or from `rotate_cached_keys`
        for a blockwise score; causal queries are the last of these tokens.
        """
        spec = self._spec
        if positions.causal and spec.leaks_future:
            raise InputError(
                f"{spec.name} uses statistics across the sequence and so leaks the future: "
                "it cannot be used with causal attention"
            )
        if spec.needs_causal and not positions.causal:
            raise InputError(f"{spec.name} is defined for causal attention only")
        if spec.selection is not None and not cached and q.shape[2] != k.shape[2]:
            raise InputError(
                f"{spec.name} adds up what all earlier queries have selected: give as many "
                f"queries as keys, or a cache, not {q.shape[2]} and {k.shape[2]}"
            )
        spec = spec.for_block(block) if spec.blockwise else spec
        near_q, far_q, pairs = self._prepare_queries(spec, q, positions, query_padding, block)
        keys = self._prepare_keys(spec, k, positions, mask.padding, block, cached)
        near_k, far_k, near_start = keys
        selection, bias, (window, sink_tokens) = None, spec.bias, spec.window
        if window is not None:
            mask = replace(mask, window=window, sink_tokens=sink_tokens)
        if spec.selection is not None:
            padding = None if mask.padding is None else mask.padding[:, v.shape[2] - q.shape[2] :]
            before = k.new_zeros(v.shape[0], v.shape[2], dtype=at_least_float32(k.dtype))
            selection = Selection(before, padding)
        return AttentionInputs(
            *(near_q, near_k, v, mask, far_q, far_k),
            far_from=None if spec.remapping is None else spec.remapping.window,
            dropout=dropout,
            bias=self._distance_bias(near_q, positions),
            sink=self.sink,
            cap=None if spec.cap is None else spec.cap.cap,
            near_start=near_start,
            pairs=pairs,
            pair_values=bias.pair_values() if isinstance(bias, PairBiasPart) else None,
            normaliser=None if spec.normaliser is None else spec.normaliser.weights,
            selection=selection,
        )

    def cache_keys(
        self,
        k: Float[Tensor, "b g s d"],
        positions: Int[Tensor, "*bk s"],
        first: int | None = None,
        padding: Bool[Tensor, "b s"] | None = None,
    ) -> Float[Tensor, "b g s cached"]:
        """Normalise and rotate keys for a cache.

        `first` is the first position if positions are consecutive. With two regimes keys are
        rotated to their far positions, and `forward` applies a norm that follows the rotation. Keys
        of a blockwise score are not rotated. Statistics over tokens ignore padding.
        """
        spec = self._spec
        k, norm_after = self._norm_before_rotation(spec, k, padding)
        if spec.blockwise:
            return k
        tables = key_tables(spec, self.head_dim, positions, k.dtype, first)
        if spec.remapping is not None:
            return _rotate(k, tables.far)
        return _rotate(k, tables.near, norm_after)

    def rotate_cached_keys(
        self,
        cached: Float[Tensor, "b g s d"],
        positions: Int[Tensor, "*bk s"],
        block: int,
        first: int | None = None,
    ) -> Float[Tensor, "b g s wide"]:
        """Rotate keys of `cache_keys` for the query rows of `block`, for a blockwise score."""
        spec = self._spec.for_block(block)
        tables = key_tables(spec, self.head_dim, positions, cached.dtype, first).select_block(block)
        return _rotate(cached, tables.near, None if spec.order is None else self._key_features)

    def _prepare_queries(
        self,
        spec: ScoreSpec,
        q: Tensor,
        positions: Positions,
        padding: Tensor | None,
        block: int,
    ) -> tuple[Tensor, Tensor | None, PairBias | None]:
        """The near and far queries, times λ, and the pair bias."""
        tables = query_tables(spec, self.head_dim, positions, q.dtype).select_block(block)

        def norm(q: Tensor) -> Tensor:
            return q if self.query_norm is None else self.query_norm(q, padding)

        def features(q: Tensor) -> Tensor:
            if isinstance(spec.position, RotaryPosition):
                q = spec.position.query_features(q)
            return self._apply_learned_scale(q, positions.n)

        q = norm(q) if spec.order is None else q
        pairs = None
        if isinstance(spec.bias, PairBiasPart):
            q, bias_query = spec.bias.split_query(q, _tensors(self.bias))
            pairs = self._pair_bias(spec.bias, spec, bias_query, positions)
        norm_after: NormAfter = None if spec.order is None else lambda x: features(norm(x))
        q = features(q) if norm_after is None else q
        near = scaled(_rotate(q, tables.near, norm_after), tables.scale)
        if tables.far is None:
            return near, None, pairs
        return near, scaled(_rotate(q, tables.far, norm_after), tables.scale), pairs

    def _apply_learned_scale(self, q: Tensor, n: Tensor) -> Tensor:
        if self.logn is not None and self._spec.logn is not None:
            n = add_head_axis(n).to(at_least_float32(q.dtype))
            n = n[None] if n.dim() == 1 else n
            q = scaled(q, self._spec.logn.learned_factor(n, _tensors(self.logn))[..., None])
        return scaled(q, self.scale)

    def _prepare_keys(
        self,
        spec: ScoreSpec,
        k: Tensor,
        positions: Positions,
        padding: Tensor | None,
        block: int,
        cached: bool,
    ) -> tuple[Tensor, Tensor | None, int]:
        """The near keys, normalised and rotated, the far keys, and the column of the first near."""
        start, window = 0, None if spec.remapping is None else spec.remapping.window
        if cached and window is None:
            return k, None, 0
        if cached and window is not None:
            # Keys at their far positions; the first that is near for the first of these rows.
            start = max(0, k.shape[2] - positions.query.shape[-1] - window + 1)
        key, first = positions.key[..., start:], start if positions.regular else None
        tables = key_tables(spec, self.head_dim, key, k.dtype, first, far_to_near=cached)
        if cached:
            norm: NormAfter = None if spec.order is None else self._key_features
            near = _rotate(k[:, :, start:], tables.near, norm)
            return near, k if norm is None else norm(k), start
        k, norm_after = self._norm_before_rotation(spec, k, padding)
        near = _rotate(k, tables.select_block(block).near, norm_after)
        return near, None if tables.far is None else _rotate(k, tables.far, norm_after), 0

    def _norm_before_rotation(
        self, spec: ScoreSpec, k: Tensor, padding: Tensor | None
    ) -> tuple[Tensor, NormAfter]:
        """Normalise keys, or return the norm to apply after the rotation."""
        if spec.order is None:
            return self._key_features(k, padding), None
        return k, lambda x: self._key_features(x, padding)

    def _key_features(self, k: Tensor, padding: Tensor | None = None) -> Tensor:
        k = k if self.key_norm is None else self.key_norm(k, padding)
        position = self._spec.position
        if not isinstance(position, RotaryPosition):
            return k
        return position.key_features(k, _tensors(self.position))

    def _pair_bias(
        self, bias: PairBiasPart, spec: ScoreSpec, q: Tensor, positions: Positions
    ) -> PairBias:
        """The bias that depends on both positions; q is normalised but not rotated."""
        device = q.device.type
        if not q.is_meta and torch.is_autocast_enabled(device):
            # Biases are computed in float32 under autocast, too.
            with torch.autocast(device, enabled=False):
                return self._pair_bias(bias, spec, q, positions)
        query = None
        if bias.reads_queries:
            scale = scale_column(query_scale(spec, self.head_dim, positions.n))
            query = scaled(self._apply_learned_scale(q, positions.n), scale)
        return bias.pairs(_tensors(self.bias), at_least_float32(q.dtype), query)

    def _distance_bias(self, q: Tensor, positions: Positions) -> Tensor | None:
        """b(h, r) for every distance r that occurs between these positions."""
        bias = self._spec.bias
        if bias is None or isinstance(bias, PairBiasPart):
            return None
        query, key = positions.query, positions.key
        count = max(1, key.shape[-1], query.shape[-1])
        if not positions.regular and query.numel() and key.numel():
            farthest = torch.stack((query.max() - key.min(), key.max() - query.min()))
            count = int(farthest.max()) + 1
        distance = torch.arange(count, device=q.device, dtype=at_least_float32(q.dtype))
        values = bias.values(distance, self.heads, _tensors(self.bias))
        if values.shape != (self.heads, count):
            raise InputError(
                f"{bias.name}.values gave the shape {tuple(values.shape)}; expected one row for "
                f"each head and one column for each distance, {(self.heads, count)}"
            )
        return values


def _parameters(part: Any, *sizes: int | None) -> nn.ParameterDict | None:
    """The parameters of a component by name; None if there is none or it learns nothing."""
    initial = None if part is None else part.learned(*sizes)
    return nn.ParameterDict(initial) if initial else None


def _tensors(parameters: nn.ParameterDict | None) -> dict[str, Tensor]:
    return {} if parameters is None else dict(parameters.items())


def _rotate(
    x: Tensor, rotation: Rotation | ChunkedRotation | None, norm: NormAfter = None
) -> Tensor:
    """Rotate x, then apply the norm that follows the rotation, if any."""
    if rotation is not None:
        return rotation(x, norm)
    return x if norm is None else norm(x)


def _check_sizes(spec: ScoreSpec, heads: int, kv_heads: int, head_dim: int) -> None:
    require_sizes("Score", heads=heads, head_dim=head_dim, kv_heads=kv_heads)
    if heads % kv_heads:
        raise InputError(f"{heads} query heads cannot share {kv_heads} key heads evenly")
    if spec.difference is not None and kv_heads % 2:
        raise InputError(
            f"{spec.name} takes heads in pairs, each with its own two keys and values, so the "
            f"number of key heads must be even, but it is {kv_heads}"
        )
    if isinstance(spec.gate, DifferentialV2) and heads // kv_heads % 2:
        raise InputError(
            f"{spec.name} takes two query heads of one key head together, so each key head must "
            f"have an even number of them, but it has {heads // kv_heads}"
        )
    position = spec.position
    if isinstance(position, RotaryPosition):
        rotary_dim = position.rotary_dim(head_dim)
        if rotary_dim % 2 or (rotary_dim > head_dim and not position.widens):
            raise InputError(f"{spec.name} needs an even head dimension, but it is {head_dim}")
    if spec.layout is not None:
        raise InputError(
            f"{spec.name} differs from layer to layer: use spec.layer(layer, layers) for one layer"
        )

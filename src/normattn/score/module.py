"""`Score`: a specification with its learned parameters, which prepares q, k and v for a kernel.

Legend: B batch, H heads, G key heads, T queries, S keys, D head dimension, E value size, R
distances.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.kernels import AttentionInputs, AttentionMask
from normattn.kernels.inputs import PairBias, Selection
from normattn.kernels.numerics import at_least_float32
from normattn.score.parts import DifferentialV2, PairBiasPart, RotaryPosition
from normattn.score.positions import Positions
from normattn.score.rotary import (
    ChunkedRotation,
    NormAfter,
    Rotation,
    by_head,
    key_tables,
    query_scale,
    query_tables,
    scale_column,
    scaled,
)
from normattn.score.spec import ScoreSpec, as_spec


class Score(nn.Module):
    """The score of a `ScoreSpec` for H query heads and G key heads of dimension D.

    Holds gains, running statistics, learned scales, biases, sinks and what pairs of heads learn; a
    specification that learns nothing has no parameters. `use` switches inference-time components on
    and off; `spec` is the active specification, `built` the original one.
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
        position, logn, bias, difference = spec.position, spec.logn, spec.bias, spec.difference
        rotary = position if isinstance(position, RotaryPosition) else None
        self.position = _parameters(
            None if rotary is None else rotary.learned(self.kv_heads, head_dim)
        )
        self.logn = _parameters(None if logn is None else logn.learned(heads, spec.train_length))
        self.bias = _parameters(None if bias is None else bias.learned(heads, head_dim))
        self.sink = None if spec.sink is None else nn.Parameter(torch.zeros(heads))
        self.difference = _parameters(None if difference is None else difference.learned(head_dim))

    @property
    def spec(self) -> ScoreSpec:
        """The active specification."""
        return self._spec

    def use(self, spec: ScoreSpec) -> None:
        """Make `spec` active; its training-time components must be those of this score."""
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
        """Prepare queries, keys and values for a kernel; all that can be is absorbed into q and k.

        `mask` says which keys are visible, before the score's own window. Statistics over tokens
        leave out padding; without `query_padding` every query is real, also if keys are padded
        (cross attention). If the score is blockwise, the rows are those of `block`. Keys that are
        `cached` come from `cache_keys`, or, if the score is blockwise, from `rotate_cached_keys`;
        if causal, the queries are the last of them.
        """
        if positions.causal and self._spec.leaks_future:
            raise InputError(
                f"{self._spec.name} uses statistics across the sequence and so leaks the future: "
                "it cannot be used with causal attention"
            )
        if self._spec.needs_causal and not positions.causal:
            raise InputError(f"{self._spec.name} is defined for causal attention only")
        spec = self._spec.for_block(block) if self._spec.blockwise else self._spec
        if spec.selection is not None and not cached and q.shape[2] != k.shape[2]:
            raise InputError(
                f"{spec.name} adds up what all earlier queries have selected: give as many "
                f"queries as keys, or a cache, not {q.shape[2]} and {k.shape[2]}"
            )
        near_q, far_q, pairs = self._queries(spec, q, positions, query_padding, block)
        first, near_k, far_k, start = 0 if positions.regular else None, k, None, 0
        remapping = None if far_q is None else spec.remapping
        if not cached:
            tables = key_tables(spec, self.head_dim, positions.key, k.dtype, first)
            k, after = self._normalise_first(spec, k, mask.padding)
            near_k = _rotate(k, tables.select_block(block).near, after)
            far_k = None if remapping is None else _rotate(k, tables.far, after)
        elif remapping is not None and remapping.window is not None:
            after = None if spec.order is None else self._key_features
            # The first column that the first of these rows reads in the near regime.
            start = max(0, k.shape[2] - q.shape[2] - remapping.window + 1)
            near, first = positions.key[..., start:], start if positions.regular else None
            back = key_tables(spec, self.head_dim, near, k.dtype, first, far_to_near=True).near
            near_k = _rotate(k[:, :, start:], back, after)
            far_k = k if after is None else after(k)
        inputs = self._inputs(near_q, near_k, v, positions, mask, dropout, pairs)
        if remapping is None:
            return inputs
        window = remapping.window
        return replace(inputs, far_q=far_q, far_k=far_k, far_from=window, near_start=start)

    def cache_keys(
        self,
        k: Float[Tensor, "b g s d"],
        positions: Int[Tensor, "*bk s"],
        first: int | None = None,
        padding: Bool[Tensor, "b s"] | None = None,
    ) -> Float[Tensor, "b g s cached"]:
        """Prepare keys for a cache; their positions count from `first` on where it is given.

        Normalised and rotated keys; rotated at their far position where there are two regimes, not
        at all where the score is blockwise. A normalisation that follows the rotation is left to
        `forward` then. Statistics over tokens leave out the padded ones.
        """
        spec = self._spec
        k, after = self._normalise_first(spec, k, padding)
        if spec.blockwise:
            return k
        tables = key_tables(spec, self.head_dim, positions, k.dtype, first)
        if spec.remapping is not None:
            return _rotate(k, tables.far)
        return _rotate(k, tables.near, after)

    def rotate_cached_keys(
        self,
        cached: Float[Tensor, "b g s d"],
        positions: Int[Tensor, "*bk s"],
        block: int,
        first: int | None = None,
    ) -> Float[Tensor, "b g s wide"]:
        """Rotate keys of `cache_keys` as the rows of `block` read them, for a blockwise score."""
        spec = self._spec.for_block(block)
        tables = key_tables(spec, self.head_dim, positions, cached.dtype, first).select_block(block)
        return _rotate(cached, tables.near, None if spec.order is None else self._key_features)

    def _queries(
        self,
        spec: ScoreSpec,
        q: Tensor,
        positions: Positions,
        padding: Tensor | None,
        block: int,
    ) -> tuple[Tensor, Tensor | None, PairBias | None]:
        """Prepare the queries, near and far, with λ folded in, and the bias of their pairs."""
        tables = query_tables(spec, self.head_dim, positions, q.dtype).select_block(block)

        def norm(q: Tensor) -> Tensor:
            return q if self.query_norm is None else self.query_norm(q, padding)

        def features(q: Tensor) -> Tensor:
            if isinstance(spec.position, RotaryPosition):
                q = spec.position.query_features(q)
            return self._learned_scale(q, positions.n)

        q = norm(q) if spec.order is None else q
        pairs, part = self._pairs(spec, q, positions), spec.bias
        if isinstance(part, PairBiasPart):
            q = part.content_query(q, _values(self.bias))
        q, after = (features(q), None) if spec.order is None else (q, lambda x: features(norm(x)))
        near = scaled(_rotate(q, tables.near, after), tables.scale)
        if tables.far is None:
            return near, None, pairs
        return near, scaled(_rotate(q, tables.far, after), tables.scale), pairs

    def _learned_scale(self, q: Tensor, n: Tensor) -> Tensor:
        """Multiply q by the learned part of λ."""
        if self.logn is not None and self._spec.logn is not None:
            n = by_head(n).to(at_least_float32(q.dtype))
            n = n[None] if n.dim() == 1 else n
            q = scaled(q, self._spec.logn.learned_factor(n, _values(self.logn))[..., None])
        return scaled(q, self.scale)

    def _normalise_first(
        self, spec: ScoreSpec, k: Tensor, padding: Tensor | None
    ) -> tuple[Tensor, NormAfter]:
        """Normalise keys that are about to rotate, or return what follows the rotation."""
        if spec.order is None:
            return self._key_features(k, padding), None
        return k, lambda x: self._key_features(x, padding)

    def _key_features(self, k: Tensor, padding: Tensor | None = None) -> Tensor:
        k = k if self.key_norm is None else self.key_norm(k, padding)
        position = self._spec.position
        if not isinstance(position, RotaryPosition):
            return k
        return position.key_features(k, _values(self.position))

    def _inputs(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Positions,
        mask: AttentionMask,
        dropout: float,
        pairs: PairBias | None,
    ) -> AttentionInputs:
        """Add what a kernel computes besides the product."""
        window, kept = self._spec.window
        selection, part = None, self._spec.bias
        if self._spec.selection is not None:
            own = None if mask.padding is None else mask.padding[:, v.shape[2] - q.shape[2] :]
            taken = k.new_zeros(v.shape[0], v.shape[2], dtype=at_least_float32(k.dtype))
            selection = Selection(taken, own)
        return AttentionInputs(
            q,
            k,
            v,
            mask if window is None else replace(mask, window=window, sink_tokens=kept),
            dropout=dropout,
            bias=self._distance_bias(q, positions),
            sink=self.sink,
            cap=None if self._spec.cap is None else self._spec.cap.cap,
            pairs=pairs,
            pair_values=part.pair_values() if isinstance(part, PairBiasPart) else None,
            normaliser=self._spec.normaliser,
            selection=selection,
        )

    def _pairs(self, spec: ScoreSpec, q: Tensor, positions: Positions) -> PairBias | None:
        """Make the bias that is no function of the distance alone; q is normalised, not rotated."""
        part, device = spec.bias, q.device.type
        if not isinstance(part, PairBiasPart):
            return None
        if not q.is_meta and torch.is_autocast_enabled(device):
            # Biases are computed in float32 also where a training computes in bf16.
            with torch.autocast(device, enabled=False):
                return self._pairs(spec, q, positions)
        query = None
        if part.reads_queries:
            scale = scale_column(query_scale(spec, self.head_dim, positions.n))
            own = part.bias_query(q, _values(self.bias))
            query = scaled(self._learned_scale(own, positions.n), scale)
        return part.pairs(_values(self.bias), at_least_float32(q.dtype), query)

    def _distance_bias(self, q: Tensor, positions: Positions) -> Tensor | None:
        """b(h, r) for every distance r that occurs between these positions."""
        part = self._spec.bias
        if part is None or isinstance(part, PairBiasPart):
            return None
        most = max(positions.key.shape[-1], positions.query.shape[-1])
        if not positions.regular and positions.query.numel() and positions.key.numel():
            furthest = torch.stack((positions.query.max(), positions.key.max()))
            most = int(furthest.max()) + 1
        distance = torch.arange(most, device=q.device, dtype=at_least_float32(q.dtype))
        bias = part.values(distance, self.heads, _values(self.bias))
        if bias.shape != (self.heads, most):
            raise InputError(
                f"{part.name}.values gave the shape {tuple(bias.shape)}; expected one row for each "
                f"head and one column for each distance, {(self.heads, most)}"
            )
        return bias


def _parameters(initial: Mapping[str, Tensor] | None) -> nn.ParameterDict | None:
    """What a part learns, by name; None where it learns nothing."""
    return nn.ParameterDict(initial) if initial else None


def _values(learned: nn.ParameterDict | None) -> dict[str, Tensor]:
    return {} if learned is None else dict(learned.items())


def _rotate(
    x: Tensor, rotation: Rotation | ChunkedRotation | None, norm: NormAfter = None
) -> Tensor:
    """Rotate x and apply the normalisation that follows, if any."""
    if rotation is not None:
        return rotation(x, norm)
    return x if norm is None else norm(x)


def _check_sizes(spec: ScoreSpec, heads: int, kv_heads: int, head_dim: int) -> None:
    if heads < 1 or head_dim < 1:
        raise InputError(f"heads and head_dim must be at least 1, not {heads} and {head_dim}")
    if kv_heads < 1 or heads % kv_heads:
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
        size = position.rotary_dim(head_dim)
        if size % 2 or (size > head_dim and not position.widens):
            raise InputError(f"{spec.name} needs an even head dimension, but it is {head_dim}")
    if spec.layout is not None:
        raise InputError(
            f"{spec.name} differs from layer to layer: use spec.layer(layer, layers) for one layer"
        )

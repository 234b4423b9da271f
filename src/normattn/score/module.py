"""`Score`: a specification with its learned parameters, which prepares q, k and v for a kernel.

Legend: B batch, H heads, G key heads, T queries, S keys, D head dimension, E value size, R
distances.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.kernels import AttentionInputs, AttentionMask
from normattn.kernels.inputs import PairBias, Selection
from normattn.score.parts import PairBiasPart, Part, RotaryPosition
from normattn.score.positions import Positions
from normattn.score.rotary import (
    ChunkKeys,
    ChunkQueries,
    Rotation,
    by_head,
    far_to_near,
    key_tables,
    query_scale,
    query_tables,
    scale_column,
    scaled,
)
from normattn.score.spec import ScoreSpec, as_spec

P = TypeVar("P", bound=Part)


class Score(nn.Module):
    """The score of a `ScoreSpec` for H query heads and Hkv key heads of dimension D.

    Holds gains, running statistics, learned scales, biases, sinks and what pairs of heads learn; a
    specification that learns nothing has no parameters. `use` switches post-hoc parts on and off;
    `spec` is the active specification, `built` the one that it was made with.
    """

    def __init__(
        self, spec: ScoreSpec | str, heads: int, head_dim: int, kv_heads: int | None = None
    ) -> None:
        super().__init__()
        spec = as_spec(spec).resolve()
        if heads < 1 or head_dim < 1:
            raise InputError(f"heads and head_dim must be at least 1, not {heads} and {head_dim}")
        self.heads, self.head_dim = heads, head_dim
        self.kv_heads = heads if kv_heads is None else kv_heads
        if self.kv_heads < 1 or heads % self.kv_heads:
            raise InputError(f"{heads} query heads cannot share {self.kv_heads} key heads evenly")
        _refuse_sizes(spec, self.kv_heads, head_dim)
        self.built = self._spec = spec
        query, key = spec.variant.query_norm(), spec.variant.key_norm()
        self.query_norm = query.build(heads, head_dim) if query else None
        self.key_norm = key.build(self.kv_heads, head_dim) if key else None
        base = spec.variant.learned_base(spec.train_length)
        self.scale = None if base is None else nn.Parameter(torch.tensor(float(base)))
        position, logn, bias = spec.position, spec.logn, spec.bias
        rotary = position if isinstance(position, RotaryPosition) else None
        self.position = _parameters(rotary, lambda part: part.learned(self.kv_heads, head_dim))
        self.logn = _parameters(logn, lambda part: part.learned(heads, spec.train_length))
        self.bias = _parameters(bias, lambda part: part.learned(heads, head_dim))
        self.sink = None if spec.sink is None else nn.Parameter(torch.zeros(heads))
        self.difference = _parameters(spec.difference, lambda part: part.learned(head_dim))

    @property
    def spec(self) -> ScoreSpec:
        """The active specification."""
        return self._spec

    def use(self, spec: ScoreSpec) -> None:
        """Make `spec` active; its trained parts must be the ones that this score was built with."""
        spec = spec.resolve(self._spec.train_length)
        if spec.trained != self._spec.trained:
            raise InputError(
                f"a model trained as {self._spec.trained} cannot be used as {spec}: the trained "
                f"parts differ ({spec.trained})"
            )
        self._spec = spec

    def extra_repr(self) -> str:
        """The specification."""
        return str(self._spec)

    def forward(
        self,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g s d"],
        v: Float[Tensor, "b g s e"],
        positions: Positions,
        seen: AttentionMask,
        query_padding: Bool[Tensor, "b t"] | None = None,
        block: int = 0,
        dropout: float = 0.0,
    ) -> AttentionInputs:
        """Prepare queries, keys and values for a kernel: everything that folds is put into q and k.

        `seen` is who sees whom but for the score's own window. Statistics over tokens leave out
        the padded ones; without `query_padding` every query is real, also where the keys are padded
        (cross attention). Where the score is blockwise, the rows are those of `block`.
        """
        spec = self._spec.for_block(block) if self._spec.blockwise else self._spec
        self._refuse(positions)
        if spec.selection is not None and q.shape[2] != k.shape[2]:
            raise InputError(
                f"{spec.name} adds up what all queries before have selected: give as many queries "
                f"as keys, or a cache, not {q.shape[2]} and {k.shape[2]}"
            )
        q_near, q_far, pairs = self._queries(spec, q, positions, query_padding, block)
        first = 0 if positions.regular else None
        tables = key_tables(spec, self.head_dim, positions.key, k.dtype, first).for_block(block)
        norm = partial(self._normed_keys, padding=seen.padding)
        k, after = (k, norm) if spec.order else (norm(k), None)
        problem = self._problem(
            q_near, _turned(k, tables.near, after), v, positions, seen, dropout, pairs
        )
        if q_far is None or spec.remapping is None:
            return problem
        far_k = _turned(k, tables.far, after)
        return replace(problem, far_q=q_far, far_k=far_k, window=spec.remapping.window)

    def cache_keys(
        self,
        k: Float[Tensor, "b g s d"],
        places: Int[Tensor, "*bk s"],
        first: int | None = None,
        padding: Bool[Tensor, "b s"] | None = None,
    ) -> Float[Tensor, "b g s cached"]:
        """Prepare keys for a cache; their positions count from `first` on where it is given.

        Normalised and rotated keys; rotated at their far position where there are two regimes, not
        at all where the score is blockwise. A normalisation that follows the rotation is left to
        `with_cached_keys` then. Statistics over tokens leave out the padded ones.
        """
        spec = self._spec
        norm = partial(self._normed_keys, padding=padding)
        if spec.order is None:
            k = norm(k)
        if spec.blockwise:
            return k
        tables = key_tables(spec, self.head_dim, places, k.dtype, first)
        if spec.remapping is not None:
            return _turned(k, tables.far)
        return _turned(k, tables.near, None if spec.order is None else norm)

    def with_cached_keys(
        self,
        q: Float[Tensor, "b h t d"],
        cached: Float[Tensor, "b g s cached"],
        v: Float[Tensor, "b g s e"],
        positions: Positions,
        seen: AttentionMask,
        query_padding: Bool[Tensor, "b t"] | None = None,
        block: int = 0,
        dropout: float = 0.0,
        rotated: Float[Tensor, "b g s wide"] | None = None,
    ) -> AttentionInputs:
        """`forward` for keys of `cache_keys`; if causal, the queries are the last of them.

        `rotated` is what `rotate_cached_keys` makes of the keys where the score is blockwise, if
        that is at hand.
        """
        spec = self._spec.for_block(block) if self._spec.blockwise else self._spec
        self._refuse(positions)
        q_near, q_far, pairs = self._queries(spec, q, positions, query_padding, block)
        given = v, positions, seen, dropout, pairs
        if self._spec.blockwise:
            whole = 0 if positions.regular else None
            k = rotated
            if k is None:
                k = self.rotate_cached_keys(cached, positions.key, block, whole)
            return self._problem(q_near, k, *given)
        if q_far is None or spec.remapping is None or spec.remapping.window is None:
            return self._problem(q_near, cached, *given)
        after = self._normed_keys if spec.order is not None else None
        # The first column that the first of these rows reads in the near regime.
        start = max(0, cached.shape[2] - q.shape[2] - spec.remapping.window + 1)
        near = positions.key[..., start:]
        first = start if positions.regular else None
        turn = far_to_near(spec, self.head_dim, near, cached.dtype, first)
        return replace(
            self._problem(q_near, _turned(cached[:, :, start:], turn, after), *given),
            far_q=q_far,
            far_k=cached if after is None else after(cached),
            window=spec.remapping.window,
            near_start=start,
        )

    def rotate_cached_keys(
        self,
        cached: Float[Tensor, "b g s d"],
        places: Int[Tensor, "*bk s"],
        block: int,
        first: int | None = None,
    ) -> Float[Tensor, "b g s wide"]:
        """Rotate keys of `cache_keys` as the rows of `block` read them, for a blockwise score."""
        spec = self._spec.for_block(block)
        tables = key_tables(spec, self.head_dim, places, cached.dtype, first).for_block(block)
        return _turned(cached, tables.near, None if spec.order is None else self._normed_keys)

    def _refuse(self, positions: Positions) -> None:
        spec = self._spec
        if positions.causal and spec.leaks_future:
            raise InputError(
                f"{spec.name} takes statistics across the sequence and so leaks the future: "
                "it cannot be used with causal attention"
            )
        if spec.needs_causal and not positions.causal:
            raise InputError(f"{spec.name} is defined for causal attention only")

    def _queries(
        self,
        spec: ScoreSpec,
        q: Tensor,
        positions: Positions,
        padding: Tensor | None,
        block: int,
    ) -> tuple[Tensor, Tensor | None, PairBias | None]:
        """Prepare the queries, near and far, with λ folded in, and the bias of their pairs."""
        tables = query_tables(spec, self.head_dim, positions, q.dtype).for_block(block)

        def norm(q: Tensor) -> Tensor:
            return q if self.query_norm is None else self.query_norm(q, padding)

        def ready(q: Tensor) -> Tensor:
            if isinstance(spec.position, RotaryPosition):
                q = spec.position.query_features(q)
            return self._weighed(q, positions.n)

        q = norm(q) if spec.order is None else q
        pairs = self._pairs(spec, q, positions)
        q, after = (ready(q), None) if spec.order is None else (q, lambda x: ready(norm(x)))
        near = scaled(_turned(q, tables.near, after), tables.scale)
        if tables.far is None:
            return near, None, pairs
        return near, scaled(_turned(q, tables.far, after), tables.scale), pairs

    def _weighed(self, q: Tensor, n: Tensor) -> Tensor:
        """Multiply q by the learned part of λ."""
        if self.logn is not None and self._spec.logn is not None:
            n = by_head(n).to(_wide(q))
            n = n[None] if n.dim() == 1 else n
            q = scaled(q, self._spec.logn.learned_factor(n, _values(self.logn))[..., None])
        return scaled(q, self.scale)

    def _normed_keys(self, k: Tensor, padding: Tensor | None = None) -> Tensor:
        k = k if self.key_norm is None else self.key_norm(k, padding)
        position = self._spec.position
        if not isinstance(position, RotaryPosition):
            return k
        return position.key_features(k, _values(self.position))

    def _problem(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Positions,
        seen: AttentionMask,
        dropout: float,
        pairs: PairBias | None,
    ) -> AttentionInputs:
        window, kept = self._spec.window
        selection = None
        if self._spec.selection is not None:
            own = None if seen.padding is None else seen.padding[:, v.shape[2] - q.shape[2] :]
            selection = Selection(k.new_zeros(v.shape[0], v.shape[2], dtype=_wide(k)), own)
        return AttentionInputs(
            q,
            k,
            v,
            seen if window is None else replace(seen, window=window, kept=kept),
            dropout=dropout,
            bias=self._bias(q, positions),
            sink=self.sink,
            cap=None if self._spec.cap is None else self._spec.cap.cap,
            pairs=pairs,
            normaliser=self._spec.normaliser,
            selection=selection,
        )

    def _pairs(self, spec: ScoreSpec, q: Tensor, positions: Positions) -> PairBias | None:
        """Make the bias that is no function of the distance alone; q is normalised, not rotated."""
        part, device = spec.bias, q.device.type
        if not isinstance(part, PairBiasPart) or self.bias is None:
            return None
        if not q.is_meta and torch.is_autocast_enabled(device):
            # Biases are computed in float32 also where a training computes in bf16.
            with torch.autocast(device, enabled=False):
                return self._pairs(spec, q, positions)
        query = None
        if part.reads_queries:
            scale = scale_column(query_scale(spec, self.head_dim, positions.n))
            query = scaled(self._weighed(q, positions.n), scale)
        return part.pairs(_values(self.bias), _wide(q), query)

    def _bias(self, q: Tensor, positions: Positions) -> Tensor | None:
        """b(h, r) for every distance r that occurs between these positions."""
        part = self._spec.bias
        if part is None or isinstance(part, PairBiasPart):
            return None
        most = max(positions.key.shape[-1], positions.query.shape[-1])
        if not positions.regular:
            furthest = torch.stack((positions.query.max(), positions.key.max()))
            most = int(furthest.max()) + 1
        distance = torch.arange(most, device=q.device, dtype=_wide(q))
        return part.values(distance, self.heads, _values(self.bias))


def _parameters(
    part: P | None, learned: Callable[[P], Mapping[str, Tensor]]
) -> nn.ParameterDict | None:
    """What a part learns, by name; None where it learns nothing."""
    initial = {} if part is None else learned(part)
    return nn.ParameterDict(initial) if initial else None


def _values(learned: nn.ParameterDict | None) -> dict[str, Tensor]:
    return {} if learned is None else dict(learned.items())


def _turned(
    x: Tensor,
    rotation: Rotation | ChunkQueries | ChunkKeys | None,
    after: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Rotate x and apply `after`, the normalisation that follows, if any."""
    if after is None:
        return x if rotation is None else rotation(x)
    if rotation is None:
        return after(x)
    return rotation.apply(lambda turn: after(turn(x)))


def _wide(x: Tensor) -> torch.dtype:
    """The type of a bias: at least float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _refuse_sizes(spec: ScoreSpec, kv_heads: int, head_dim: int) -> None:
    if spec.difference is not None and kv_heads % 2:
        raise InputError(
            f"{spec.name} takes heads in pairs, each with two keys and values of its own, so the "
            f"key heads must be an even number, but there are {kv_heads}"
        )
    position = spec.position if isinstance(spec.position, RotaryPosition) else None
    turned = 0 if position is None else position.rotary_dim(head_dim)
    if turned % 2 or (turned > head_dim and not (position is not None and position.widens)):
        raise InputError(f"{spec.name} needs an even head dimension, but it is {head_dim}")
    if spec.layout is not None:
        raise InputError(
            f"{spec.name} differs from layer to layer: take spec.layer(layer, layers) for one"
        )

"""`Score`: a specification with what it learns; turns q, k and v into a kernel's problem.

Legend: B batch, H heads, G key heads, T queries, S keys, D head dimension, E value size, R
distances.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.kernels import Problem, Visibility
from normattn.kernels.problem import PairBias
from normattn.kernels.selection import Selection
from normattn.score.fold import (
    beside,
    by_head,
    key_fold,
    near_from_far,
    query_fold,
    query_scale,
    scaled,
)
from normattn.score.folded_parts import RotaryPosition
from normattn.score.normalisation import refuse_future
from normattn.score.outer_parts import PairBiasPart
from normattn.score.positions import Positions
from normattn.score.rotary import ByChunk, Rotation, SideBySide
from normattn.score.spec import ScoreSpec, as_spec


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
        _refuse_sizes(spec, heads, self.kv_heads, head_dim)
        self.built = self._spec = spec
        query, key = spec.variant.query_norm(), spec.variant.key_norm()
        self.query_norm = query.build(heads, head_dim) if query else None
        self.key_norm = key.build(self.kv_heads, head_dim) if key else None
        learned = spec.variant.learned_base(spec.train_length)
        self.scale = None if learned is None else nn.Parameter(torch.tensor(float(learned)))
        rotary = spec.position if isinstance(spec.position, RotaryPosition) else None
        angles = {} if rotary is None else rotary.learned(self.kv_heads, head_dim)
        self.position = nn.ParameterDict(angles) if angles else None
        grown = {} if spec.logn is None else spec.logn.learned(heads, spec.train_length)
        self.logn = nn.ParameterDict(grown) if grown else None
        bias = {} if spec.bias is None else spec.bias.learned(heads, head_dim)
        self.bias = nn.ParameterDict(bias) if bias else None
        self.sink = None if spec.sink is None else nn.Parameter(torch.zeros(heads))
        joins = {} if spec.difference is None else spec.difference.learned(head_dim)
        self.difference = nn.ParameterDict(joins) if joins else None

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

    @torch.no_grad()
    def project(self) -> None:
        """Put what is learned back into its range (`KERPLELog`, `KERPLEPower`), in place.

        A training loop does so after each step of its optimiser (`project_parameters`). Outputs do
        not depend on it: what is out of range counts as the nearest value within.
        """
        part = self._spec.bias
        if part is not None and self.bias is not None:
            part.project(dict(self.bias.items()))

    def extra_repr(self) -> str:
        """The specification."""
        return str(self._spec)

    def forward(
        self,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g s d"],
        v: Float[Tensor, "b g s e"],
        positions: Positions,
        seen: Visibility,
        query_padding: Bool[Tensor, "b t"] | None = None,
        block: int = 0,
        dropout: float = 0.0,
    ) -> Problem:
        """The problem of these queries, keys and values: everything that folds is in q and k.

        `seen` is who sees whom but for the score's own window. Statistics over tokens leave out
        the padded ones; without `query_padding` every query is real, also where the keys are padded
        (cross attention). Where the score moves, the rows are those of `block`.
        """
        spec = self._spec.fixed(block) if self._spec.moves else self._spec
        self._refuse(positions)
        if spec.selection is not None and q.shape[2] != k.shape[2]:
            raise InputError(
                f"{spec.name} adds up what all queries before have selected: give as many queries "
                f"as keys, or a cache, not {q.shape[2]} and {k.shape[2]}"
            )
        q_near, q_far, pairs = self._queries(spec, q, positions, query_padding, block)
        first = 0 if positions.regular else None
        fold = key_fold(spec, self.head_dim, positions.key, k.dtype, first).read_by(block)
        norm = partial(self._normed_keys, padding=seen.padding)
        k = k if spec.order else norm(k)
        after = norm if spec.order else None
        k_near = _turned(k, fold.near, after)
        problem = self._problem(q_near, k_near, v, positions, seen, dropout, pairs)
        if q_far is None or spec.regime is None:
            return problem
        far_k = _turned(k, fold.far, after)
        return replace(problem, far_q=q_far, far_k=far_k, window=spec.regime.window)

    def store(
        self,
        k: Float[Tensor, "b g s d"],
        places: Int[Tensor, "*bk s"],
        first: int | None = None,
        padding: Bool[Tensor, "b s"] | None = None,
    ) -> Float[Tensor, "b g s stored"]:
        """What a cache keeps of keys at these positions (counted from `first` where it is given).

        Normalised and rotated keys; rotated at their far position where there are two regimes, not
        at all where the spectrum moves. A normalisation that follows the rotation is left to
        `recall` then. Statistics over tokens leave out the padded ones.
        """
        spec = self._spec
        later = spec.moves or spec.regime is not None
        norm = partial(self._normed_keys, padding=padding)
        if spec.order is None:
            k = norm(k)
        if spec.moves:
            return k
        fold = key_fold(spec, self.head_dim, places, k.dtype, first)
        after = norm if spec.order is not None and not later else None
        return _turned(k, fold.near if spec.regime is None else fold.far, after)

    def recall(
        self,
        q: Float[Tensor, "b h t d"],
        stored: Float[Tensor, "b g s stored"],
        v: Float[Tensor, "b g s e"],
        positions: Positions,
        seen: Visibility,
        query_padding: Bool[Tensor, "b t"] | None = None,
        block: int = 0,
        dropout: float = 0.0,
        turned: Float[Tensor, "b g s wide"] | None = None,
    ) -> Problem:
        """`forward` for keys that `store` has made; if causal, the queries are the last of them.

        `turned` is what `turn` has made of the keys where the spectrum moves, if that is at hand.
        """
        spec = self._spec.fixed(block) if self._spec.moves else self._spec
        self._refuse(positions)
        q_near, q_far, pairs = self._queries(spec, q, positions, query_padding, block)
        if self._spec.moves:
            whole = 0 if positions.regular else None
            k = self.turn(stored, positions.key, block, whole) if turned is None else turned
            return self._problem(q_near, k, v, positions, seen, dropout, pairs)
        if q_far is None or spec.regime is None or spec.regime.window is None:
            return self._problem(q_near, stored, v, positions, seen, dropout, pairs)
        after = self._normed_keys_alone if spec.order is not None else None
        start = _first_near(q.shape[2], stored.shape[2], spec.regime.window)
        near = positions.key[..., start:]
        first = start if positions.regular else None
        turn = near_from_far(spec, self.head_dim, near, stored.dtype, first)
        k = _turned(stored[:, :, start:], turn, after)
        return replace(
            self._problem(q_near, k, v, positions, seen, dropout, pairs),
            far_q=q_far,
            far_k=stored if after is None else after(stored),
            window=spec.regime.window,
            near_start=start,
        )

    def turn(
        self,
        stored: Float[Tensor, "b g s d"],
        places: Int[Tensor, "*bk s"],
        block: int,
        first: int | None = None,
    ) -> Float[Tensor, "b g s wide"]:
        """Keys of `store` as rows of `block` read them, where the score moves."""
        spec = self._spec.fixed(block)
        fold = key_fold(spec, self.head_dim, places, stored.dtype, first).read_by(block)
        after = self._normed_keys_alone if spec.order is not None else None
        return _turned(stored, fold.near, after)

    def _refuse(self, positions: Positions) -> None:
        spec = self._spec
        if positions.causal and spec.leaks_future:
            refuse_future(True, True, spec.name)
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
        """Queries of the near and the far regime, λ and what is learned folded in; their bias."""
        fold = query_fold(spec, self.head_dim, positions, q.dtype).read_by(block)

        def norm(q: Tensor) -> Tensor:
            return q if self.query_norm is None else self.query_norm(q, padding)

        def ready(q: Tensor) -> Tensor:
            if isinstance(spec.position, RotaryPosition):
                q = spec.position.query_features(q)
            return self._weighed(q, positions.n)

        q = norm(q) if spec.order is None else q
        pairs = self._pairs(spec, q, positions)
        q, after = (ready(q), None) if spec.order is None else (q, lambda x: ready(norm(x)))
        near = _scaled(_turned(q, fold.near, after), fold.scale)
        if fold.far is None:
            return near, None, pairs
        return near, _scaled(_turned(q, fold.far, after), fold.scale), pairs

    def _weighed(self, q: Tensor, n: Tensor) -> Tensor:
        """q times what is learned of λ."""
        spec = self._spec
        if self.logn is not None and spec.logn is not None:
            n = by_head(n).to(_wide(q))
            n = n[None] if n.dim() == 1 else n
            q = scaled(q, spec.logn.learned_factor(n, dict(self.logn.items()))[..., None])
        return _scaled(q, self.scale)

    def _normed_keys(self, k: Tensor, padding: Tensor | None) -> Tensor:
        k = k if self.key_norm is None else self.key_norm(k, padding)
        position = self._spec.position
        if not isinstance(position, RotaryPosition):
            return k
        return position.key_features(
            k, {} if self.position is None else dict(self.position.items())
        )

    def _normed_keys_alone(self, k: Tensor) -> Tensor:
        return self._normed_keys(k, None)

    def _problem(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Positions,
        seen: Visibility,
        dropout: float,
        pairs: PairBias | None,
    ) -> Problem:
        """What is left to a kernel: the score's window, bias, cap and sink on folded q and k."""
        window, kept = self._spec.visible
        selection = None
        if self._spec.selection is not None:
            own = None if seen.padding is None else seen.padding[:, v.shape[2] - q.shape[2] :]
            selection = Selection(k.new_zeros(v.shape[0], v.shape[2], dtype=_wide(k)), own)
        return Problem(
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
        """The bias that is no function of the distance alone; q is normalised, not yet turned."""
        part, device = spec.bias, q.device.type
        if not isinstance(part, PairBiasPart) or self.bias is None:
            return None
        if not q.is_meta and torch.is_autocast_enabled(device):
            # Biases are computed in float32 also where a training computes in bf16.
            with torch.autocast(device, enabled=False):
                return self._pairs(spec, q, positions)
        query = None
        if part.reads_queries:
            scale = beside(query_scale(spec, self.head_dim, positions.n))
            query = _scaled(self._weighed(q, positions.n), scale)
        return part.pairs(dict(self.bias.items()), _wide(q), query)

    def _bias(self, q: Tensor, positions: Positions) -> Tensor | None:
        """b(h, r) for every distance r that occurs between these positions."""
        part = self._spec.bias
        if part is None or isinstance(part, PairBiasPart):
            return None
        learned = {} if self.bias is None else dict(self.bias.items())
        most = max(positions.key.shape[-1], positions.query.shape[-1])
        if not positions.regular:
            furthest = torch.stack((positions.query.max(), positions.key.max()))
            most = int(furthest.max()) + 1
        distance = torch.arange(most, device=q.device, dtype=_wide(q))
        return part.values(distance, self.heads, learned)


def project_parameters(model: nn.Module) -> None:
    """`Score.project` for every score in a model: call it after each step of an optimiser."""
    for module in model.modules():
        if isinstance(module, Score):
            module.project()


def _turned(
    x: Tensor,
    rotation: Rotation | SideBySide | ByChunk | None,
    after: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    if isinstance(rotation, SideBySide | ByChunk):
        return rotation.laid(lambda turn: _turned(x, turn, after))
    x = x if rotation is None else rotation(x)
    return x if after is None else after(x)


def _wide(x: Tensor) -> torch.dtype:
    """The type of a bias: at least float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _scaled(x: Tensor, scale: Tensor | float | None) -> Tensor:
    return x if scale is None else scaled(x, scale)


def _first_near(queries: int, keys: int, window: int) -> int:
    """The first column that the first of the last `queries` rows reads in the near regime."""
    return max(0, keys - queries - window + 1)


def _refuse_sizes(spec: ScoreSpec, heads: int, kv_heads: int, head_dim: int) -> None:
    if spec.difference is not None and kv_heads % 2:
        raise InputError(
            f"{spec.name} takes heads in pairs, each with two keys and values of its own, so the "
            f"key heads must be an even number, but there are {kv_heads}"
        )
    position = spec.position if isinstance(spec.position, RotaryPosition) else None
    turned = 0 if position is None else position.rotated(head_dim)
    if turned % 2 or (turned > head_dim and not (position is not None and position.widens)):
        raise InputError(f"{spec.name} needs an even head dimension, but it is {head_dim}")
    if spec.layout is not None:
        raise InputError(
            f"{spec.name} differs from layer to layer: take spec.layer(layer, layers) for one"
        )

"""`Score`: a specification with what it learns; turns q and k into plain tensors for a kernel.

Legend: B batch, H heads, T queries, S keys, D head dimension.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.score.normalisation import refuse_future
from normattn.score.part import rope_frequencies
from normattn.score.positions import Positions
from normattn.score.rotary import Rotation, rotation
from normattn.score.spec import ScoreSpec, as_spec


@dataclass(frozen=True)
class FarPair:
    """Queries and keys of the far regime, used where i − j ≥ window."""

    q: Float[Tensor, "b h t d"]
    k: Float[Tensor, "b hk s d"]
    window: int


@dataclass(frozen=True)
class Prepared:
    """What a kernel needs: s(i, j) = ⟨q_i, k_j⟩, or ⟨far.q_i, far.k_j⟩ where i − j ≥ window."""

    q: Float[Tensor, "b h t d"]
    k: Float[Tensor, "b hk s d"]
    far: FarPair | None = None


@dataclass(frozen=True)
class _Tables:
    """The folded rotations, or, without positions, the scale of the queries alone."""

    query: Rotation | None
    key: Rotation | None
    far_query: Rotation | None
    far_key: Rotation | None
    scale: Tensor | float


class Score(nn.Module):
    """The score of a `ScoreSpec` for H query heads and Hkv key heads of dimension D.

    Holds gains, running statistics and learned scales; a specification that learns nothing has
    no parameters. `use` switches post-hoc parts on and off; `spec` is the active specification.
    """

    def __init__(
        self, spec: ScoreSpec | str, heads: int, head_dim: int, kv_heads: int | None = None
    ) -> None:
        super().__init__()
        spec = as_spec(spec).resolve()
        if heads < 1 or head_dim < 1:
            raise InputError(f"heads and head_dim must be at least 1, not {heads} and {head_dim}")
        if spec.position.rotary and head_dim % 2:
            raise InputError(f"{spec.name} needs an even head dimension, but it is {head_dim}")
        self.heads, self.head_dim = heads, head_dim
        self.kv_heads = heads if kv_heads is None else kv_heads
        if self.kv_heads < 1 or heads % self.kv_heads:
            raise InputError(f"{heads} query heads cannot share {self.kv_heads} key heads evenly")
        self._spec = spec
        query, key = spec.variant.query_norm(), spec.variant.key_norm()
        self.query_norm = query.build(heads, head_dim) if query else None
        self.key_norm = key.build(self.kv_heads, head_dim) if key else None
        learned = spec.variant.learned_base(spec.train_length)
        self.scale = None if learned is None else nn.Parameter(torch.tensor(float(learned)))

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
        k: Float[Tensor, "b hk s d"],
        positions: Positions,
        key_padding: Bool[Tensor, "b s"] | None = None,
    ) -> Prepared:
        """Fold normalisation, scale and rotation into q and k."""
        spec = self._spec
        refuse_future(positions.causal, spec.leaks_future, spec.name)
        if spec.needs_causal and not positions.causal:
            raise InputError(f"{spec.name} is defined for causal attention only")
        q, k = self._normalise(q, k, key_padding)
        tables = fold_tables(spec, self.head_dim, positions, q.dtype)
        return _apply(tables, q, k, spec)

    def _normalise(self, q: Tensor, k: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.query_norm is not None:
            same = padding is not None and padding.shape[-1] == q.shape[2]
            q = self.query_norm(q, padding if same else None)
        if self.key_norm is not None:
            k = self.key_norm(k, padding)
        if self.scale is not None:
            q = _times(q, self.scale)
        return q, k


def _apply(tables: _Tables, q: Tensor, k: Tensor, spec: ScoreSpec) -> Prepared:
    if tables.query is None or tables.key is None:
        scale = tables.scale
        return Prepared(_times(q, scale) if isinstance(scale, Tensor) else q * scale, k)
    far = None
    if tables.far_query is not None and tables.far_key is not None:
        assert spec.regime is not None
        assert spec.regime.window is not None
        far = FarPair(tables.far_query(q), tables.far_key(k), spec.regime.window)
    return Prepared(tables.query(q), tables.key(k), far)


def _times(q: Tensor, scale: Tensor) -> Tensor:
    """q · scale, half precision rounded once: a rounded scale would be off for the whole row."""
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    return (q.to(wide) * scale.to(wide)).to(q.dtype)


def query_scale(spec: ScoreSpec, head_dim: int, positions: Positions) -> Tensor | float:
    """λ(i), in float64: a number, or a tensor (T,), (B, T) or (B, 1)."""
    gain = 1.0 if spec.spectrum is None else spec.spectrum.gain()
    variant, logn = spec.variant, spec.logn
    if logn is None:
        return variant.base(head_dim, spec.train_length) * gain
    assert spec.train_length is not None
    n = positions.n.double()
    if variant.logn_replaces_base and logn.when == "trained-in":
        return variant.base_at(n) * gain
    return logn.factor(n, spec.train_length) * (variant.base(head_dim, spec.train_length) * gain)


_KEPT: OrderedDict[tuple[object, ...], _Tables] = OrderedDict()
_KEPT_AT_MOST = 16


def fold_tables(
    spec: ScoreSpec, head_dim: int, positions: Positions, dtype: torch.dtype
) -> _Tables:
    """The tables for these positions; kept for regular ones under everything that decides them."""
    if not positions.regular or torch.compiler.is_compiling():
        return _make_tables(spec, head_dim, positions, dtype)
    device = positions.query.device
    shape = (positions.query.shape[-1], positions.key.shape[-1], positions.causal)
    key = (spec, head_dim, *shape, dtype, device)
    if key not in _KEPT:
        # Ordinary tensors even when first asked for in inference mode: training reuses them.
        with torch.inference_mode(False):
            _KEPT[key] = _make_tables(spec, head_dim, positions, dtype)
        while len(_KEPT) > _KEPT_AT_MOST:
            _KEPT.popitem(last=False)
    _KEPT.move_to_end(key)
    return _KEPT[key]


def _make_tables(
    spec: ScoreSpec, head_dim: int, positions: Positions, dtype: torch.dtype
) -> _Tables:
    scale = query_scale(spec, head_dim, positions)
    if not spec.position.rotary:
        if isinstance(scale, Tensor):
            scale = scale[..., None] if scale.dim() == 1 else scale[:, None, :, None]
        return _Tables(None, None, None, None, scale)
    base: float = spec.position.base  # type: ignore[attr-defined]
    layout: str = spec.position.layout  # type: ignore[attr-defined]
    interleaved = layout == "interleaved"
    if spec.spectrum is None:
        theta = rope_frequencies(head_dim, base)
    else:
        theta = spec.spectrum.inverse_frequencies(head_dim, base, spec.train_length)
    query, key = positions.query.double(), positions.key.double()
    near = (
        rotation(query, theta, scale, interleaved, dtype),
        rotation(key, theta, 1.0, interleaved, dtype),
    )
    far: tuple[Rotation | None, Rotation | None] = (None, None)
    if spec.regime is not None:
        far_query, far_key = spec.regime.far_positions(query, key)
        far = (
            rotation(far_query, theta, scale, interleaved, dtype),
            rotation(far_key, theta, 1.0, interleaved, dtype),
        )
    return _Tables(*near, *far, 1.0)

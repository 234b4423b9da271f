"""Tables that fold λ and the rotation into q and k, kept for positions that are simply counted.

Legend: B batch, T queries, S keys, P pairs of features that turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normattn.score.part import RotaryPosition, rope_frequencies
from normattn.score.positions import Positions
from normattn.score.rotary import Rotation, last_position, rotation
from normattn.score.spec import ScoreSpec


@dataclass(frozen=True)
class QueryFold:
    """What is done to queries: rotations with λ folded in, or λ alone as `scale`.

    `scale` is (T, 1), (B, 1, T, 1) or a number; None where a rotation holds it. It stays outside
    where nothing turns and where the normalisation follows the rotation.
    """

    near: Rotation | None
    far: Rotation | None
    scale: Tensor | float | None

    def rows(self, rows: slice) -> QueryFold:
        """The tables of some of the positions."""
        scale = self.scale
        if isinstance(scale, Tensor) and scale.shape[-2] > 1:
            scale = scale[..., rows, :]
        return QueryFold(_rows(self.near, rows), _rows(self.far, rows), scale)


@dataclass(frozen=True)
class KeyFold:
    """What is done to keys; `turn` takes a key from its far to its near position."""

    near: Rotation | None
    far: Rotation | None
    turn: Rotation | None

    def rows(self, rows: slice) -> KeyFold:
        """The tables of some of the positions."""
        return KeyFold(_rows(self.near, rows), _rows(self.far, rows), _rows(self.turn, rows))


def _rows(rotation: Rotation | None, rows: slice) -> Rotation | None:
    return None if rotation is None else rotation.rows(rows)


def query_scale(spec: ScoreSpec, head_dim: int, n: Int[Tensor, "*bn u"]) -> Tensor | float:
    """λ(i), in float64: a number, or a tensor of the shape of n, the number of visible keys."""
    gain = 1.0 if spec.spectrum is None else spec.spectrum.gain(spec.train_length)
    variant, logn = spec.variant, spec.logn
    if logn is None:
        return variant.base(head_dim, spec.train_length) * gain
    n = n.double()
    if variant.logn_replaces_base and logn.replaces_base:
        return variant.base_at(n) * gain
    return logn.factor(n, spec.train_length) * (variant.base(head_dim, spec.train_length) * gain)


def query_fold(
    spec: ScoreSpec, head_dim: int, positions: Positions, dtype: torch.dtype
) -> QueryFold:
    """The queries' tables at these positions."""
    queries, keys = positions.query.shape[-1], positions.key.shape[-1]
    device = positions.query.device
    if not positions.regular or torch.compiler.is_compiling():
        return _query_fold(spec, head_dim, positions.query, positions.n, dtype)
    if not positions.causal:
        name = ("queries", spec, head_dim, dtype, device, queries, keys)
        return _kept(name, lambda: _query_fold(spec, head_dim, positions.query, positions.n, dtype))
    capacity = _capacity(spec, head_dim, dtype, keys)
    whole = _kept(
        ("queries", spec, head_dim, dtype, device, capacity),
        lambda: _counted_fold(spec, head_dim, torch.arange(capacity, device=device), dtype),
    )
    return whole.rows(slice(keys - queries, keys))


def key_fold(
    spec: ScoreSpec,
    head_dim: int,
    places: Int[Tensor, "*bk s"],
    dtype: torch.dtype,
    first: int | None = None,
) -> KeyFold:
    """The keys' tables at these positions, which count from `first` on where it is given."""
    if first is None or torch.compiler.is_compiling():
        return _key_fold(spec, head_dim, places, dtype)
    device, last = places.device, first + places.shape[-1]
    capacity = _capacity(spec, head_dim, dtype, last)
    whole = _kept(
        ("keys", spec, head_dim, dtype, device, capacity),
        lambda: _key_fold(spec, head_dim, torch.arange(capacity, device=device), dtype),
    )
    return whole.rows(slice(first, last))


def _counted_fold(spec: ScoreSpec, head_dim: int, place: Tensor, dtype: torch.dtype) -> QueryFold:
    """Causal, at positions 0, 1, …."""
    return _query_fold(spec, head_dim, place, place + 1, dtype)


def _query_fold(
    spec: ScoreSpec, head_dim: int, place: Tensor, n: Tensor, dtype: torch.dtype
) -> QueryFold:
    scale = query_scale(spec, head_dim, n)
    alone: Tensor | float | None = None
    if not spec.position.rotary or spec.order is not None:
        alone, scale = _beside(scale), 1.0
    turn = _turner(spec, head_dim, dtype)
    if turn is None:
        return QueryFold(None, None, alone)
    far = None
    if spec.regime is not None:
        far = turn(spec.regime.far_positions(place.double(), place.double())[0], scale, 1)
    return QueryFold(turn(place, scale, 1), far, alone)


def _key_fold(spec: ScoreSpec, head_dim: int, place: Tensor, dtype: torch.dtype) -> KeyFold:
    turn = _turner(spec, head_dim, dtype)
    if turn is None:
        return KeyFold(None, None, None)
    if spec.regime is None:
        return KeyFold(turn(place, 1.0, -1), None, None)
    at = place.double()
    far = spec.regime.far_positions(at, at)[1]
    return KeyFold(turn(place, 1.0, -1), turn(far, 1.0, -1), turn(at - far, 1.0, -1))


@dataclass(frozen=True)
class _Turner:
    """The rotation at positions, as a function of them, a scale and the sign of growth."""

    theta: Tensor
    growth: Tensor | None
    interleaved: bool
    dtype: torch.dtype

    def __call__(self, place: Tensor, scale: Tensor | float, sign: int) -> Rotation:
        signed = None if self.growth is None else self.growth * sign
        return rotation(place.double(), self.theta, scale, self.interleaved, self.dtype, signed)


def _turner(spec: ScoreSpec, head_dim: int, dtype: torch.dtype) -> _Turner | None:
    """How things turn; None where nothing does."""
    position = spec.position
    if not isinstance(position, RotaryPosition):
        return None
    theta, growth = frequencies(spec, head_dim), position.log_growth(head_dim)
    return _Turner(theta, growth, position.layout == "interleaved", dtype)


def frequencies(spec: ScoreSpec, head_dim: int) -> Float[Tensor, " p"]:
    """θ'_m of the pairs that turn, in float64; empty where nothing does."""
    position = spec.position
    if not isinstance(position, RotaryPosition):
        return torch.empty(0, dtype=torch.float64)
    size = position.rotated(head_dim)
    if spec.spectrum is None:
        return position.turning(rope_frequencies(size, position.base))
    theta = spec.spectrum.inverse_frequencies(size, position.base, spec.train_length)
    return position.turning(theta)


def _beside(scale: Tensor | float) -> Tensor | float:
    """λ as a factor of (B, H, T, D)."""
    if not isinstance(scale, Tensor):
        return scale
    return scale[..., None] if scale.dim() == 1 else scale[:, None, :, None]


def _capacity(spec: ScoreSpec, head_dim: int, dtype: torch.dtype, positions: int) -> int:
    """The next power of two: growing by a token seldom makes new tables.

    Where features grow with the position, the tables end where the dtype does.
    """
    room = max(64, 1 << (positions - 1).bit_length())
    growth = (
        spec.position.log_growth(head_dim) if isinstance(spec.position, RotaryPosition) else None
    )
    return room if growth is None else max(positions, min(room, last_position(growth, dtype) + 1))


F = TypeVar("F")
_KEPT: OrderedDict[tuple[object, ...], object] = OrderedDict()
_KEPT_AT_MOST = 32


def _kept(name: tuple[object, ...], make: Callable[[], F]) -> F:
    """What `make` made under this name, which holds everything that decides it."""
    if name not in _KEPT:
        # Ordinary tensors even when first asked for in inference mode: training reuses them.
        with torch.inference_mode(False):
            _KEPT[name] = make()
        while len(_KEPT) > _KEPT_AT_MOST:
            _KEPT.popitem(last=False)
    _KEPT.move_to_end(name)
    found: F = _KEPT[name]  # type: ignore[assignment]
    return found


def scaled(q: Float[Tensor, "b h t d"], scale: Tensor | float) -> Float[Tensor, "b h t d"]:
    """q · scale, half precision rounded once: a rounded scale would be off for the whole row."""
    if not isinstance(scale, Tensor):
        return q * scale
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    return (q.to(wide) * scale.to(wide)).to(q.dtype)

"""Tables that fold λ and the rotation into q and k, kept for positions that are simply counted.

Legend: B batch, T queries, S keys, P pairs of features that turn.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normattn.score.folded_parts import RotaryPosition, rope_frequencies
from normattn.score.positions import Positions
from normattn.score.rotary import ByChunk, Rotation, SideBySide, last_position, rotation
from normattn.score.spec import ScoreSpec


@dataclass(frozen=True)
class Fold:
    """What is done to queries or to keys: rotations to their near and their far positions.

    `far` is None where there is one regime, or nothing to do. λ is folded into the rotations of
    queries, or stays outside as `scale`, (T, 1), (B, 1, T, 1) or a number: where nothing turns, and
    where the normalisation follows the rotation. Where rules go by chunks `near` has all of them.
    """

    near: Rotation | SideBySide | ByChunk | None = None
    far: Rotation | None = None
    scale: Tensor | float | None = None

    def rows(self, rows: slice) -> Fold:
        """The tables of some of the positions."""
        near = None if self.near is None else self.near.rows(rows)
        far = None if self.far is None else self.far.rows(rows)
        scale = self.scale
        if isinstance(scale, Tensor) and scale.shape[-2] > 1:
            scale = scale[..., rows, :]
        return Fold(near, far, scale)

    def read_by(self, block: int) -> Fold:
        """The tables as the rows of a block read them."""
        if not isinstance(self.near, SideBySide | ByChunk):
            return self
        return replace(self, near=self.near.read_by(block))


@dataclass(frozen=True, eq=False)
class Turner:
    """How pairs of features turn with the position.

    Attributes:
        theta: θ_m of the pairs (P,), in float64.
        interleaved: whether features 2m and 2m + 1 are a pair, instead of m and m + P.
        growth: the logarithm by which each pair grows from position to position (XPos).
        amplitude: what cos and sin are multiplied with; features that do not turn keep their size.
        start: the first of the 2·P features that turn.
    """

    theta: Float[Tensor, " p"]
    interleaved: bool
    growth: Float[Tensor, " p"] | None = None
    amplitude: float = 1.0
    start: int = 0

    def at(
        self, positions: Tensor, dtype: torch.dtype, scale: Tensor | float = 1.0, sign: int = 1
    ) -> Rotation:
        """The rotation to these positions, times `scale`; keys (sign −1) shrink what grows."""
        growth = None if self.growth is None else self.growth * sign
        made = rotation(positions.double(), self.theta, scale, self.interleaved, dtype, growth)
        size = self.amplitude
        if self.start:
            made = replace(made, start=self.start)
        return made if size == 1 else replace(made, cos=made.cos * size, sin=made.sin * size)

    def queries(
        self, spec: ScoreSpec, positions: Tensor, scale: Tensor | float, dtype: torch.dtype
    ) -> Fold:
        """To the near and far positions of queries, or to those of all rules by chunks."""
        at, rules, regime = positions.double(), spec.chunk_rules, spec.regime
        if rules is not None:
            rotations = (self.at(own, dtype, scale) for own in rules.query_positions(at))
            return Fold(SideBySide(tuple(rotations)))
        far = None if regime is None else regime.far_positions(at, at)[0]
        return Fold(self.at(at, dtype, scale), None if far is None else self.at(far, dtype, scale))

    def keys(self, spec: ScoreSpec, positions: Tensor, dtype: torch.dtype) -> Fold:
        """To the near and far positions of keys, or to those in their chunks."""
        at, rules, regime = positions.double(), spec.chunk_rules, spec.regime
        if rules is not None:
            assert rules.size is not None
            chunk = positions.div(rules.size, rounding_mode="floor").long()[..., None]
            own = self.at(rules.key_positions(at), dtype, sign=-1)
            return Fold(ByChunk(own, chunk if chunk.dim() == 2 else chunk[:, None]))
        far = None if regime is None else regime.far_positions(at, at)[1]
        near = self.at(at, dtype, sign=-1)
        return Fold(near, None if far is None else self.at(far, dtype, sign=-1))


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


def query_fold(spec: ScoreSpec, head_dim: int, positions: Positions, dtype: torch.dtype) -> Fold:
    """The queries' tables at these positions."""
    queries, keys = positions.query.shape[-1], positions.key.shape[-1]
    device = positions.query.device
    if not positions.regular or positions.masked or torch.compiler.is_compiling():
        return _query_fold(spec, head_dim, positions.query, positions.n, dtype)
    name = ("queries", spec, head_dim, dtype)
    if not positions.causal:
        return _KEPT.made(
            (*name, device, queries, keys),
            lambda: _query_fold(spec, head_dim, positions.query, positions.n, dtype),
        )

    def make(query: Tensor) -> Fold:
        return _query_fold(spec, head_dim, query, query + 1, dtype)

    capacity = _capacity(spec, head_dim, dtype, keys)
    return _KEPT.counted(name, (keys - queries, keys), capacity, device, make)


def key_fold(
    spec: ScoreSpec,
    head_dim: int,
    places: Int[Tensor, "*bk s"],
    dtype: torch.dtype,
    first: int | None = None,
) -> Fold:
    """The keys' tables at these positions, which count from `first` on where it is given."""

    def make(places: Tensor) -> Fold:
        turner = _turner(spec, head_dim)
        return Fold() if turner is None else turner.keys(spec, places, dtype)

    return _of_keys("keys", spec, head_dim, places, dtype, first, make)


def near_from_far(
    spec: ScoreSpec,
    head_dim: int,
    places: Int[Tensor, "*bk s"],
    dtype: torch.dtype,
    first: int | None = None,
) -> Rotation | None:
    """What takes keys from their far to their near positions, which are as for `key_fold`."""

    def make(places: Tensor) -> Fold:
        turner = _turner(spec, head_dim)
        if turner is None or spec.regime is None:
            return Fold()
        at = places.double()
        return Fold(turner.at(at - spec.regime.far_positions(at, at)[1], dtype, sign=-1))

    near = _of_keys("near from far", spec, head_dim, places, dtype, first, make).near
    assert near is None or isinstance(near, Rotation)
    return near


def _of_keys(
    kind: str,
    spec: ScoreSpec,
    head_dim: int,
    places: Tensor,
    dtype: torch.dtype,
    first: int | None,
    make: Callable[[Tensor], Fold],
) -> Fold:
    if first is None or torch.compiler.is_compiling():
        return make(places)
    last = first + places.shape[-1]
    capacity = _capacity(spec, head_dim, dtype, last)
    name = (kind, spec, head_dim, dtype)
    return _KEPT.counted(name, (first, last), capacity, places.device, make)


def _query_fold(
    spec: ScoreSpec, head_dim: int, positions: Tensor, n: Tensor, dtype: torch.dtype
) -> Fold:
    scale, turner = query_scale(spec, head_dim, n), _turner(spec, head_dim)
    if turner is None:
        return Fold(scale=beside(scale))
    # Rotations have no axis of heads, which n has where each head has a mask of its own.
    if spec.order is None and n.dim() < 3:
        return turner.queries(spec, positions, scale, dtype)
    return replace(turner.queries(spec, positions, 1.0, dtype), scale=beside(scale))


def _turner(spec: ScoreSpec, head_dim: int) -> Turner | None:
    """How things turn; None where nothing does. The gain is in λ."""
    position = spec.position
    if not isinstance(position, RotaryPosition):
        return None
    return Turner(
        frequencies(spec, head_dim),
        interleaved=position.layout == "interleaved",
        growth=position.log_growth(head_dim),
        start=position.start(head_dim),
    )


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


def beside(scale: Tensor | float) -> Tensor | float:
    """λ of the shape of n as a factor of (B, H, T, D)."""
    if not isinstance(scale, Tensor):
        return scale
    return by_head(scale)[..., None]


def by_head(n: Tensor) -> Tensor:
    """n, or what is made of it, (T,), (B, T) or (B, H, T), broadcastable to (B, H, T)."""
    return n[:, None] if n.dim() == 2 else n


def _capacity(spec: ScoreSpec, head_dim: int, dtype: torch.dtype, positions: int) -> int:
    """The next power of two: growing by a token seldom makes new tables.

    Where features grow with the position, the tables end where the dtype does.
    """
    room = max(64, 1 << (positions - 1).bit_length())
    growth = (
        spec.position.log_growth(head_dim) if isinstance(spec.position, RotaryPosition) else None
    )
    return room if growth is None else max(positions, min(room, last_position(growth, dtype) + 1))


class Kept(OrderedDict[tuple[object, ...], Fold]):
    """The last `most` tables that were made, each under a name that holds all that decides it.

    Threads share it: two that ask for the same table at once may both make it, and get equal ones.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Kept], tuple[int]]:
        # A copy makes its tables again: it may stand on another device, or be changed.
        return Kept, (self.most,)

    def made(self, name: tuple[object, ...], make: Callable[[], Fold]) -> Fold:
        """What `make` made under this name."""
        with self._lock:
            if name in self:
                self.move_to_end(name)
                return self[name]
        # Ordinary tensors even when first asked for in inference mode: training reuses them.
        with torch.inference_mode(False):
            fold = make()
        with self._lock:
            self[name] = fold
            self.move_to_end(name)
            while len(self) > self.most:
                self.popitem(last=False)
        return fold

    def forget(self) -> None:
        """Drop them all."""
        with self._lock:
            self.clear()

    def counted(
        self,
        name: tuple[object, ...],
        bounds: tuple[int, int],
        room: int,
        device: torch.device,
        make: Callable[[Tensor], Fold],
    ) -> Fold:
        """What `make` makes of positions within `bounds`, from a table of 0 … room − 1."""
        whole = self.made((*name, device, room), lambda: make(torch.arange(room, device=device)))
        return whole.rows(slice(*bounds))


_KEPT = Kept(32)


def forget_tables() -> None:
    """Make them anew when they are next asked for."""
    _KEPT.forget()


def scaled(q: Float[Tensor, "b h t d"], scale: Tensor | float) -> Float[Tensor, "b h t d"]:
    """q · scale, half precision rounded once: a rounded scale would be off for the whole row."""
    if not isinstance(scale, Tensor):
        return q * scale
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    return (q.to(wide) * scale.to(wide)).to(q.dtype)

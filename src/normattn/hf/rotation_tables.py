"""What an extended layer does to queries and keys: the scale and the rotations, as tables.

Queries and keys arrive un-rotated (or, where only log-n is added, rotated by the model). The
rotation is that of the model's own frequencies, stretched where the method says so.

Legend: B batch, T queries, S keys, P pairs of features that turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.score import Positions, ScoreSpec
from normattn.score.parts import rope_frequencies
from normattn.score.parts.rope_scaling import PI
from normattn.score.rotary import RotaryTables, Rotator, TableCache


@dataclass(frozen=True)
class HeadRotation:
    """How a layer's heads are rotated by the model.

    Attributes:
        frequencies: θ_m of the pairs that turn, as trained (P,), in float64.
        base: the base that they, or those they were scaled from, are powers of; None if unknown.
        interleaved: whether features 2m and 2m + 1 are a pair, instead of m and m + P.
        amplitude: what the model multiplies cos and sin with.
        head_dim: features of a head.
        start: the first of the 2P features that turn.
        scaled: the kind of scaling that the frequencies were trained with, if any.
        normed: whether queries and keys are normalised after the rotation.
        gains: what features of queries and of keys, those that turn first, are multiplied with so
            that they turn evenly: norms after the rotation may have a gain.
    """

    frequencies: Float[Tensor, " p"]
    base: float | None
    interleaved: bool
    amplitude: float
    head_dim: int
    start: int = 0
    scaled: str | None = None
    normed: bool = False
    gains: tuple[Float[Tensor, " d"], Float[Tensor, " d"]] | None = None

    def alike(self, other: HeadRotation) -> bool:
        """Whether both turn in the same way."""
        same = all(
            getattr(self, field.name) == getattr(other, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("frequencies", "gains")
        )
        if self.gains is not None or other.gains is not None:
            same = same and self.gains is other.gains
        return same and torch.equal(self.frequencies, other.frequencies)

    def arranged(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """x with the features that turn first."""
        if not self.start:
            return x
        return torch.cat((x[..., self.start :], x[..., : self.start]), -1)


def method_frequencies(spec: ScoreSpec, rotation: HeadRotation) -> Float[Tensor, " p"]:
    """θ' of a method whose spectrum does not move; the model's own where it has none.

    The method's θ'_m/θ_m, of plain frequencies, times those that are there: scaled ones are scaled
    once more, and those that are 0 stay 0.
    """
    if spec.rope_scaling is None:
        return rotation.frequencies
    if isinstance(spec.rope_scaling, PI):
        return rotation.frequencies / spec.rope_scaling.stretch
    assert rotation.base is not None
    size = 2 * rotation.frequencies.numel()
    meant = spec.rope_scaling.inverse_frequencies(size, rotation.base, spec.train_length)
    return rotation.frequencies * (meant / rope_frequencies(size, rotation.base))


def method_amplitude(spec: ScoreSpec, rotation: HeadRotation) -> float:
    """What cos and sin are multiplied with: the square root of what the logit shall be."""
    gain = 1.0 if spec.rope_scaling is None else spec.rope_scaling.gain(spec.train_length)
    return float(rotation.amplitude * gain**0.5)


def query_factor(spec: ScoreSpec, scaling: float, n: Tensor) -> Tensor | float:
    """λ at n visible keys: the model's own scale, and log-n."""
    if spec.logn is None:
        return scaling
    assert spec.train_length is not None
    return spec.logn.factor(n.double(), spec.train_length) * scaling


@dataclass(eq=False)
class MethodTables:
    """A method's tables over a rotation that a model brings with it, kept while it is in use."""

    spec: ScoreSpec
    rotation: HeadRotation

    def __post_init__(self) -> None:
        # The rows of one block of a moving spectrum are few: only its keys are worth keeping.
        self._kept = TableCache(32 if self.spec.blockwise else 8)
        # Far keys that all stand at 0 need no rotation (ReRoPE).
        self._still = False
        if self.spec.remapping is not None and method_amplitude(self.spec, self.rotation) == 1:
            some = torch.tensor([1.0, 2.0**20])
            self._still = not bool(self.spec.remapping.far_positions(some, some)[1].any())

    def queries(
        self, at: Positions, block: int, scaling: float, dtype: torch.dtype
    ) -> RotaryTables:
        """The tables of queries at these positions, as the rows of `block` read them.

        `scaling` is the model's own λ.
        """

        def make(places: Tensor) -> RotaryTables:
            spec, turner = self._turner(block)
            scale = query_factor(spec, scaling, places.clamp(min=0) + 1)
            return turner.queries(spec, places, scale, dtype)

        if self.spec.blockwise:
            return make(at.query).for_block(block)
        last = at.key.shape[-1]
        bounds = (last - at.query.shape[-1], last)
        return self._counted(at, at.query, bounds, ("queries", scaling, dtype), make)

    def keys(self, at: Positions, start: int, block: int, dtype: torch.dtype) -> RotaryTables:
        """The tables of keys from column `start` on, as the rows of `block` read them."""

        def make(places: Tensor) -> RotaryTables:
            spec, turner = self._turner(block)
            made = turner.keys(spec, places, dtype)
            return replace(made, far=None) if self._still else made

        bounds = (start, at.key.shape[-1])
        # Rules by chunks turn keys alike for every block, and lay them out for each.
        name = ("keys", 0 if self.spec.chunk_remapping is not None else block, dtype)
        return self._counted(at, at.key[..., start:], bounds, name, make).for_block(block)

    def _turner(self, block: int) -> tuple[ScoreSpec, Rotator]:
        """The method as the rows of `block` read it, and how it turns."""
        spec, rotation = self.spec.for_block(block), self.rotation
        theta, size = method_frequencies(spec, rotation), method_amplitude(spec, rotation)
        return spec, Rotator(theta, rotation.interleaved, amplitude=size)

    def _counted(
        self,
        at: Positions,
        places: Tensor,
        bounds: tuple[int, int],
        name: tuple[object, ...],
        make: Callable[[Tensor], RotaryTables],
    ) -> RotaryTables:
        if not at.regular or torch.compiler.is_compiling():
            return make(places)
        room = max(64, 1 << (bounds[1] - 1).bit_length())
        return self._kept.counted(name, bounds, room, places.device, make)

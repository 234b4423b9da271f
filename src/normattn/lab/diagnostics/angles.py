"""Which relative positions a model meets for the first time beyond its training length.

Legend: R distances, P pairs of features that turn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float

from normattn.score import ScoreSpec
from normattn.score.parts import RotaryPosition, rope_frequencies


def beyond(train_length: int, distances: int) -> Float[torch.Tensor, " r"]:
    """1 for every distance from L on, of 0 … R − 1."""
    return (torch.arange(distances) >= train_length).double()


@dataclass(frozen=True)
class Stage:
    """The score that a layer was trained with for a while, and the tokens of a sequence then."""

    spec: ScoreSpec
    length: int


def unseen_angles(
    spec: ScoreSpec,
    head_dim: int,
    distances: int,
    block: int = 0,
    stages: Sequence[Stage] | None = None,
) -> Float[torch.Tensor, " r"] | None:
    """For every distance r = 0 … R − 1 the share of pairs of features at an angle never trained.

    Pair m turns by θ_m·ρ(r), where θ is the spectrum of a score (that of query rows block·L … where
    it moves) and ρ the relative position that it makes of r. In training it has seen those up to
    the largest of r < L, over all `stages`, or all angles if that goes round the circle. `spec` is
    what reads now, `stages` what was trained: by default its trained parts alone, at their L. A
    spectrum that was trained in is a stage's. None where nothing turns, or no training length is
    known.
    """
    length = spec.train_length
    if not isinstance(spec.position, RotaryPosition) or length is None:
        return None
    if stages is None:
        stages = (Stage(spec.trained, length),)
    angle = _turns(spec, head_dim, distances, block)
    seen = torch.stack([angle.new_zeros(angle.shape[-1]), *_seen(stages, head_dim)]).amax(0)
    # Rounding must not make a new angle of the last one that was seen.
    new = (angle % (2 * math.pi) > seen * (1 + 1e-9) + 1e-9) & (seen < 2 * math.pi)
    return new.double().mean(-1)


def _seen(stages: Sequence[Stage], head_dim: int) -> Iterator[Float[torch.Tensor, " p"]]:
    """The largest turn of each pair of features, a tensor for each stage and block of its rows."""
    for stage in stages:
        if isinstance(stage.spec.position, RotaryPosition):
            size = stage.spec.train_length if stage.spec.blockwise else stage.length
            assert size is not None
            for block, first in enumerate(range(0, stage.length, size)):
                distances = min(stage.length, first + size)
                yield _turns(stage.spec, head_dim, distances, block).amax(0)


def _turns(
    spec: ScoreSpec, head_dim: int, distances: int, block: int
) -> Float[torch.Tensor, "r p"]:
    """How far each pair of features turns at every distance, in radians."""
    position = spec.position
    assert isinstance(position, RotaryPosition)
    size = position.rotated(head_dim)
    theta = rope_frequencies(size, position.base)
    fixed = spec.for_block(block) if spec.blockwise else spec
    if fixed.rope_scaling is not None:
        assert spec.train_length is not None
        theta = fixed.rope_scaling.inverse_frequencies(size, position.base, spec.train_length)
    return _relative(fixed, distances)[:, None] * position.turning(theta).abs()


def _relative(spec: ScoreSpec, distances: int) -> Float[torch.Tensor, " r"]:
    """ρ(r): r itself, and what a second regime makes of it beyond its window."""
    distance = torch.arange(distances, dtype=torch.float64)
    regime, rules = spec.remapping, spec.chunk_remapping
    if rules is not None:
        return distance.clamp(max=rules.reach - 1)
    if regime is None or regime.window is None:
        return distance
    query, key = regime.far_positions(distance, torch.zeros_like(distance))
    return torch.where(distance >= regime.window, query - key, distance)

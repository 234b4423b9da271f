"""Which relative positions a model meets for the first time beyond its training length.

Legend: R distances, P pairs of features that turn.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.score import ScoreSpec
from normattn.score.parts import RotaryPosition, rope_frequencies


def unseen_angles(
    spec: ScoreSpec,
    head_dim: int,
    distances: int,
    block: int = 0,
    trained: ScoreSpec | None = None,
) -> Float[Tensor, " r"] | None:
    """For every distance r = 0 … R − 1 the share of pairs of features at an angle never trained.

    Pair m turns by θ_m·ρ(r), where θ are the frequencies of a score (those of query rows block·L …
    where they move) and ρ the relative position that it makes of r. In training it has seen those
    up to the largest of r < L, or all angles if that goes round the circle. `spec` is what reads
    now, `trained` what was trained (default: its trained parts alone). None where nothing turns, or
    no training length is known.
    """
    length = spec.train_length
    if not isinstance(spec.position, RotaryPosition) or length is None:
        return None
    angle = _turns(spec, head_dim, distances, block)
    seen = _turns(spec.trained if trained is None else trained, head_dim, length, 0).amax(0)
    # Rounding must not make a new angle of the last one that was seen.
    new = (angle % (2 * math.pi) > seen * (1 + 1e-9) + 1e-9) & (seen < 2 * math.pi)
    return new.double().mean(-1)


def _turns(spec: ScoreSpec, head_dim: int, distances: int, block: int) -> Float[Tensor, "r p"]:
    """How far each pair of features turns at every distance, in radians."""
    position = spec.position
    assert isinstance(position, RotaryPosition)
    size = position.rotary_dim(head_dim)
    theta = rope_frequencies(size, position.base)
    fixed = spec.for_block(block) if spec.blockwise else spec
    if fixed.rope_scaling is not None:
        assert spec.train_length is not None
        theta = fixed.rope_scaling.inverse_frequencies(size, position.base, spec.train_length)
    return _relative(fixed, distances)[:, None] * position.adjusted(theta).abs()


def _relative(spec: ScoreSpec, distances: int) -> Float[Tensor, " r"]:
    """ρ(r): r itself, and what a position remapping makes of it beyond its window."""
    distance = torch.arange(distances, dtype=torch.float64)
    remapping, chunks = spec.remapping, spec.chunk_remapping
    if chunks is not None:
        return distance.clamp(max=chunks.reach - 1)
    if remapping is None or remapping.window is None:
        return distance
    query, key = remapping.far_positions(distance, torch.zeros_like(distance))
    return torch.where(distance >= remapping.window, query - key, distance)

"""Rotation angles that a model has not seen in training.

Legend: R distances, P pairs of rotated features.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.score import ScoreSpec
from normattn.score.parts import RotaryPosition, rope_frequencies


def unseen_angles(
    spec: ScoreSpec, head_dim: int, distances: int, block: int = 0, trained: ScoreSpec | None = None
) -> Float[Tensor, " r"] | None:
    """Return for every distance r = 0 … R − 1 the share of feature pairs at unseen angles.

    Pair m rotates by θ_m·ρ(r). θ are the frequencies of a score (for query rows block·L … if they
    depend on the block), and ρ(r) is its relative position for r. Angles up to the largest of r < L
    were trained, or all of them if that is a full circle. `spec` is the present score, `trained`
    the trained one (default: its trained components). None without rotation or training length.
    """
    length = spec.train_length
    if not isinstance(spec.position, RotaryPosition) or length is None:
        return None
    angle = _angles(spec, head_dim, distances, block)
    seen = _angles(spec.trained if trained is None else trained, head_dim, length, 0).amax(0)
    # A tolerance, so that rounding does not make the last seen angle unseen.
    unseen = (angle % (2 * math.pi) > seen * (1 + 1e-9) + 1e-9) & (seen < 2 * math.pi)
    return unseen.double().mean(-1)


def _angles(spec: ScoreSpec, head_dim: int, distances: int, block: int) -> Float[Tensor, "r p"]:
    """Return the rotation of each feature pair at every distance, in radians."""
    position = spec.position
    assert isinstance(position, RotaryPosition)
    size = position.rotary_dim(head_dim)
    theta = rope_frequencies(size, position.base)
    spec = spec.for_block(block) if spec.blockwise else spec
    if spec.rope_scaling is not None:
        assert spec.train_length is not None
        theta = spec.rope_scaling.inverse_frequencies(size, position.base, spec.train_length)
    return _relative_positions(spec, distances)[:, None] * position.adjusted(theta).abs()


def _relative_positions(spec: ScoreSpec, distances: int) -> Float[Tensor, " r"]:
    """Return ρ(r): r, or its remapped position beyond the window."""
    distance = torch.arange(distances, dtype=torch.float64)
    remapping, chunks = spec.remapping, spec.chunk_remapping
    if chunks is not None:
        return distance.clamp(max=chunks.reach - 1)
    if remapping is None or remapping.window is None:
        return distance
    query, key = remapping.far_positions(distance, torch.zeros_like(distance))
    return torch.where(distance >= remapping.window, query - key, distance)

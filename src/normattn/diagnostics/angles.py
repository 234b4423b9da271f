"""Which relative positions a model meets for the first time beyond its training length.

Legend: R distances, P pairs of features that turn.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float

from normattn.score import ScoreSpec
from normattn.score.folded_parts import RotaryPosition, rope_frequencies


def beyond(train_length: int, distances: int) -> Float[torch.Tensor, " r"]:
    """1 for every distance from L on, of 0 … R − 1."""
    return (torch.arange(distances) >= train_length).double()


def unseen_angles(
    spec: ScoreSpec, head_dim: int, distances: int, block: int = 0
) -> Float[torch.Tensor, " r"] | None:
    """For every distance r = 0 … R − 1 the share of pairs of features at an angle never trained.

    In training pair m turns by θ_m·r, r = 0 … L − 1: it has seen all angles if that goes round the
    circle, else those up to θ_m(L − 1). Read under a method it turns by θ'_m·ρ(r), where θ' is the
    method's spectrum (that of query rows block·L … where it moves) and ρ the relative position
    that it makes of r. None where nothing turns, or no training length is known.
    """
    position, length = spec.position, spec.train_length
    if not isinstance(position, RotaryPosition) or length is None:
        return None
    size = position.rotated(head_dim)
    trained = position.turning(rope_frequencies(size, position.base)).abs()
    fixed = spec.fixed(block) if spec.moves else spec
    read = trained
    if fixed.spectrum is not None:
        theta = fixed.spectrum.inverse_frequencies(size, position.base, length)
        read = position.turning(theta).abs()
    angle = (_relative(fixed, distances)[:, None] * read) % (2 * math.pi)
    seen = trained * (length - 1)
    # Rounding must not make a new angle of the last one that was seen.
    new = (angle > seen * (1 + 1e-9) + 1e-9) & (seen < 2 * math.pi)
    return new.double().mean(-1)


def _relative(spec: ScoreSpec, distances: int) -> Float[torch.Tensor, " r"]:
    """ρ(r): r itself, and what a second regime makes of it beyond its window."""
    distance = torch.arange(distances, dtype=torch.float64)
    regime, rules = spec.regime, spec.chunk_rules
    if rules is not None:
        return distance.clamp(max=rules.reach - 1)
    if regime is None or regime.window is None:
        return distance
    query, key = regime.far_positions(distance, torch.zeros_like(distance))
    return torch.where(distance >= regime.window, query - key, distance)

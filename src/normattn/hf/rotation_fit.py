"""Fit the rotation that maps queries or keys before it to those after it.

`extend` knows the frequencies, from the model's rotary module; `score_of` measures them.

Legend: B batch, H heads, T tokens, D head dimension, P pairs of features that rotate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float
from torch import Tensor

TOLERANCE = 2e-4
"""The tolerance of a fit in float32, as a share of the largest number."""


@dataclass(frozen=True)
class RotaryLayout:
    """The `size` features from `start` on that rotate, and how they form pairs.

    Pairs are (m, m + P) or, `interleaved`, (2m, 2m + 1). `reordered`: the rotation also moves the
    pairs (2m, 2m + 1) to (m, m + P), as in DeepSeek.
    """

    size: int
    start: int = 0
    interleaved: bool = False
    reordered: bool = False

    def halves(self, x: Float[Tensor, "*b d"]) -> tuple[Float[Tensor, "*b p"], ...]:
        """The first and the second feature of each pair, as views of x."""
        end = self.start + self.size
        if self.interleaved:
            return x[..., self.start : end : 2], x[..., self.start + 1 : end : 2]
        return x[..., self.start : end].chunk(2, -1)

    def rotate(
        self, x: Float[Tensor, "b h t d"], factor: Complex[Tensor, "t p"]
    ) -> Float[Tensor, "b h t d"]:
        """x in float64, with each pair as a complex number times its factor."""
        x = x.double().clone()
        first, second = self.halves(x)
        rotated = torch.complex(first, second) * factor
        first.copy_(rotated.real)
        second.copy_(rotated.imag)
        return x

    def restored(self, x: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h t d"]:
        """x with its features in the order before the rotation."""
        if not self.reordered:
            return x
        end = self.start + self.size
        first, second = x[..., self.start : end].chunk(2, -1)
        pairs = torch.stack((first, second), -1).flatten(-2)
        return torch.cat((x[..., : self.start], pairs, x[..., end:]), -1)


@dataclass(frozen=True)
class Rotation:
    """The angle θ of each pair per position, and the factor of all features at each position.

    `gain` has a factor for each feature that undoes the gain of a norm after the rotation, so that
    both features of a pair have the same; None without such a norm.
    """

    layout: RotaryLayout
    frequencies: Float[Tensor, " p"]
    amplitude: Float[Tensor, " t"]
    gain: Float[Tensor, " d"] | None = None


def fit_rotation(
    unrotated: Float[Tensor, "b h t d"],
    rotated: Float[Tensor, "b h t d"],
    layout: RotaryLayout,
    frequencies: Float[Tensor, " p"] | None = None,
    normed: bool = False,
    tolerance: float = TOLERANCE,
) -> Rotation | None:
    """The rotation of this layout at positions 0 … T − 1; None where none maps one to the other.

    It has the given frequencies or their negatives; those of None are measured. With known ones it
    also fits the gain of a norm after the rotation (`normed`). The factor of the first position is
    one of cos and sin; its growth with the position is one of all features.
    """
    x, y = unrotated.double().cpu(), rotated.double().cpu()
    positions = torch.arange(x.shape[2], dtype=torch.float64)[:, None]
    gain = None
    if normed and frequencies is not None:
        gain = _fit_gain(x, y, layout, positions * frequencies)
        x, y = x * gain, y * gain
    z, w = (torch.complex(*layout.halves(side)) for side in (x, y))
    ratio = (w * z.conj()).sum((0, 1)) / z.abs().square().sum((0, 1)).clamp(min=1e-30)  # (T, P)
    amplitude = ratio.abs().mean(-1)
    known = frequencies is not None
    for theta in (frequencies, -frequencies) if known else (_measure_frequencies(ratio),):
        grown = x * (amplitude / amplitude[0])[:, None]
        turned = layout.rotate(grown, torch.polar(amplitude[:1], positions * theta))
        if float((turned - y).abs().max()) <= tolerance * float(y.abs().max()):
            return Rotation(layout, theta, amplitude, gain)
    return None


def _measure_frequencies(ratio: Complex[Tensor, "t p"]) -> Float[Tensor, " p"]:
    """θ with ratio_p ∝ e^{iθp}, refined from position to position."""
    theta = ratio[1].angle()
    for position in range(2, ratio.shape[0]):
        theta = theta + (ratio[position] * torch.exp(-1j * theta * position)).angle() / position
    return theta


def _fit_gain(
    x: Float[Tensor, "b h t d"],
    y: Float[Tensor, "b h t d"],
    layout: RotaryLayout,
    angle: Float[Tensor, "t p"],
) -> Float[Tensor, " d"]:
    """Factors that undo a gain after the rotation: g_a/g_b for the second feature of a pair.

    With a gain g the pair (a, b) becomes a' = a·cos − (g_a/g_b)·b·sin. The ratio is fitted by least
    squares over tokens and heads.
    """
    (a, b), (rotated_a, _) = layout.halves(x), layout.halves(y)
    u, v = b * angle.sin(), a * angle.cos() - rotated_a
    norm = u.square().sum((0, 1, 2))
    gain = torch.ones(x.shape[-1], dtype=torch.float64)
    ratio = (u * v).sum((0, 1, 2)) / norm.clamp(min=1e-30)
    layout.halves(gain)[1].copy_(torch.where(norm > 0, ratio, 1.0))
    return gain


def find_base(theta: Float[Tensor, " p"]) -> float | None:
    """The base b with θ_m = b^(−m/P); None where there is none."""
    pairs = theta.numel()
    if pairs < 2 or abs(float(theta[0] - 1)) > TOLERANCE or float(theta.min()) <= 0:
        return None
    half = max(1, pairs // 2)
    base = math.exp(-math.log(float(theta[half])) * pairs / half)
    error = (theta - base ** -(torch.arange(pairs, dtype=torch.float64) / pairs)).abs().max()
    return base if base > 1 and float(error) < TOLERANCE / 10 else None

"""The rotation of a layer's heads: its layout, its fit to recorded tensors, and under a method.

`extend` knows the frequencies, from the model's rotary module; `score_of` measures them. Position
embeddings have a row for each token: cos and sin of its P angles, once or twice (θ₀ … θ₀ … or θ₀ θ₀
θ₁ θ₁ …), or cos + i·sin as complex numbers.

Legend: B batch, H heads, T tokens, D head dimension, P pairs of features that rotate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from normattn.score import ScoreSpec
from normattn.score.parts import rope_frequencies
from normattn.score.parts.rope_scaling import PI

TOLERANCE = 2e-4
"""The tolerance of a fit in float32, as a share of the largest number."""
FULL_PRECISION = (torch.float32, torch.float64, torch.complex64)
"""Types whose values are compared with a tight tolerance."""
Layout = Literal["once", "halves", "pairs", "complex"]
Spectrum = tuple[Tensor, float]
"""Frequencies θ (P,) in float64, and the factor of cos and sin."""


@dataclass(frozen=True)
class RotaryLayout:
    """The `size` features from `start` on that rotate, and how they form pairs.

    Pairs are (m, m + P) or, `interleaved`, (2m, 2m + 1); DeepSeek's are `reordered` to (m, m + P).
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
    """The angle θ of each pair per position, and the factor of all features at each position."""

    layout: RotaryLayout
    frequencies: Float[Tensor, " p"]
    amplitude: Float[Tensor, " t"]
    gain: Float[Tensor, " d"] | None = None  # factors that undo that of a norm after the rotation


def fit_rotation(
    unrotated: Float[Tensor, "b h t d"],
    rotated: Float[Tensor, "b h t d"],
    layout: RotaryLayout,
    frequencies: Float[Tensor, " p"] | None = None,
    normed: bool = False,
    tolerance: float = TOLERANCE,
) -> Rotation | None:
    """The rotation of this layout at positions 0 … T − 1; None where none maps one to the other.

    It has the given frequencies or their negatives; without any they are measured. With known ones
    it also fits the gain of a norm after the rotation (`normed`). The amplitude at the first
    position multiplies cos and sin; its growth with the position multiplies all features.
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
    if frequencies is None:  # ratio_p ∝ e^{iθp}, refined from position to position
        measured = ratio[1].angle()
        for p in range(2, ratio.shape[0]):
            measured = measured + (ratio[p] * torch.exp(-1j * measured * p)).angle() / p
    for theta in (measured,) if frequencies is None else (frequencies, -frequencies):
        grown = x * (amplitude / amplitude[0])[:, None]
        turned = layout.rotate(grown, torch.polar(amplitude[:1], positions * theta))
        if float((turned - y).abs().max()) <= tolerance * float(y.abs().max()):
            return Rotation(layout, theta, amplitude, gain)
    return None


def _fit_gain(
    x: Float[Tensor, "b h t d"],
    y: Float[Tensor, "b h t d"],
    layout: RotaryLayout,
    angle: Float[Tensor, "t p"],
) -> Float[Tensor, " d"]:
    """Factors that undo a gain after the rotation: g_a/g_b for the second feature of a pair.

    With a gain g the pair (a, b) becomes a' = a·cos − (g_a/g_b)·b·sin, fitted by least squares.
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


@dataclass(frozen=True)
class EmbeddingTables:
    """The format in which a model computes position embeddings from frequencies."""

    layout: Layout  # the order of the P angles of a token
    frequencies: Float[Tensor, " p"]  # θ_m as trained, in float64
    amplitude: float  # the factor of cos and sin

    def make(self, ids: Int[Tensor, "b t"], spectrum: Spectrum, like: Any) -> Any:
        """Position embeddings of these positions and spectrum, with the type of `like`."""
        theta, amplitude = spectrum
        first = like if isinstance(like, Tensor) else like[0]
        # In float32 on the device, as in transformers.
        angle = ids.to(first.device)[..., None].float() * theta.to(first.device, torch.float32)
        if self.layout == "complex":
            return (torch.polar(torch.ones_like(angle), angle) * amplitude).to(first.dtype)
        angle = _arrange(angle, self.layout)
        return tuple((x * amplitude).to(first.dtype) for x in (angle.cos(), angle.sin()))


def _arrange(angle: Tensor, layout: Layout) -> Tensor:
    if layout == "halves":
        return torch.cat((angle, angle), -1)
    return angle.repeat_interleave(2, -1) if layout == "pairs" else angle


def read_tables(value: Any, spectra: Iterable[Spectrum]) -> EmbeddingTables | None:
    """The format of tables of positions 0 … T − 1, with the spectrum that fits them best."""
    cos, sin = (value.real, value.imag) if isinstance(value, Tensor) else value
    best, best_error = None, 1e-4 if value[0].dtype in FULL_PRECISION else 2e-2
    cos, sin = cos[0].double().cpu(), sin[0].double().cpu()
    layouts: Sequence[Layout] = ("once", "halves", "pairs")
    measured = float(cos[0, 0])
    for theta, nominal in spectra:
        amplitude = nominal if abs(measured - nominal) <= 1e-2 * nominal else measured
        positions = torch.arange(cos.shape[0], dtype=torch.float64)[:, None]
        for layout in ("complex",) if isinstance(value, Tensor) else layouts:
            angle = _arrange(positions * theta, layout)
            if angle.shape[-1] != cos.shape[-1]:
                continue
            differences = (angle.cos() * amplitude - cos, angle.sin() * amplitude - sin)
            error = float(torch.stack(differences).abs().max())
            if error < best_error:
                best, best_error = EmbeddingTables(layout, theta, amplitude), error
    return best


@dataclass(frozen=True, eq=False)
class HeadRotation:
    """How the model rotates a layer's heads."""

    tables: EmbeddingTables  # the format of the layer's position embeddings
    unrotated: tuple[Float[Tensor, "b h t d"], Float[Tensor, "b g t d"]]  # its probed q and k
    frequencies: Float[Tensor, " p"]  # θ_m of the pairs that rotate, as trained, in float64
    base: float | None  # of the frequencies before any scaling; None if unknown
    layout: RotaryLayout
    amplitude: float  # the model's factor of cos and sin; 1 where a norm follows the rotation
    head_dim: int
    scaled: str | None = None  # the rope type that the frequencies were trained with, if any
    # Where queries and keys are normalised after the rotation: factors that undo the norm's gain.
    gains: tuple[Float[Tensor, " d"], Float[Tensor, " d"]] | None = None

    def rotated(self, x: Float[Tensor, "b h t d"], side: int) -> Float[Tensor, "b h t d"]:
        """Rotate queries (side 0) or keys (1) at positions 0 … T − 1, in float64."""
        angle = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * self.frequencies
        factor = torch.polar(torch.full_like(angle, self.amplitude), angle).to(x.device)
        if self.gains is None:
            return self.layout.rotate(x, factor)
        gain = self.gains[side].to(x.device)
        return self.layout.rotate(x * gain, factor) / gain

    def spectrum(self, spec: ScoreSpec) -> Spectrum:
        """The frequencies under a method, and the factor of cos and sin."""
        amplitude = self.tables.amplitude * method_gain(spec) ** 0.5
        return method_frequencies(spec, self).abs(), amplitude


def method_frequencies(spec: ScoreSpec, rotation: HeadRotation) -> Float[Tensor, " p"]:
    """θ' of a method that is the same at every length; the model's θ where it scales none.

    The model's frequencies are multiplied by the method's θ'_m/θ_m of unscaled frequencies. So
    those that are scaled already are scaled once more, and those that are 0 stay 0.
    """
    if spec.rope_scaling is None:
        return rotation.frequencies
    if isinstance(spec.rope_scaling, PI):
        return rotation.frequencies / spec.rope_scaling.stretch
    assert rotation.base is not None
    size = 2 * rotation.frequencies.numel()
    scaled = spec.rope_scaling.inverse_frequencies(size, rotation.base, spec.train_length)
    return rotation.frequencies * (scaled / rope_frequencies(size, rotation.base))


def method_gain(spec: ScoreSpec) -> float:
    """A method's factor of the logits, the square of its factor of cos and sin."""
    return 1.0 if spec.rope_scaling is None else float(spec.rope_scaling.gain(spec.train_length))

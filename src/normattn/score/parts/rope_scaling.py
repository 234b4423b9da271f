"""RoPE scaling: rotary frequencies that differ from training, mostly for longer text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from normattn.errors import InputError
from normattn.score.parts.base import Part, Parts, Slot, number, register
from normattn.score.parts.rope import RotaryPosition, Theta, rope_frequencies


@dataclass(frozen=True)
class RopeScaling(Part):
    """Other rotary frequencies after training.

    `blockwise`: each block of L query rows has its own frequencies (`for_block`).
    """

    slot = Slot.ROPE_SCALING
    when = "inference-time"
    needs_rotary = True
    blockwise: ClassVar[bool] = False

    def for_block(self, block: int, train_length: int) -> RopeScaling:
        """The scaling of query rows block·L … block·L + L − 1, for blockwise scalings."""
        return self

    def inverse_frequencies(self, head_dim: int, base: float, train_length: int | None) -> Theta:
        """θ'_m in float64, m = 0 … d/2 − 1, in radians per token; blockwise scalings have none."""
        hint = " for all rows: use for_block(…)" if self.blockwise else ""
        raise InputError(f"{self.name} has no frequencies{hint}")

    def gain(self, train_length: int | None) -> float:
        """The factor of λ."""
        return 1.0


@dataclass(frozen=True)
class FactorScaling(RopeScaling):
    """A scaling that stretches the usable length by `factor` (s ≥ 1)."""

    factor: float | None = number(default=None, least=1, fill=lambda part, length, factor: factor)

    @property
    def stretch(self) -> float:
        """The factor s; `InputError` if it is open."""
        stretch: float = self.required("factor")
        return stretch


@register
class PI(FactorScaling):
    """Position interpolation: every frequency is divided by the factor."""

    equation = "θ'_m = θ_m / s"
    source = "arXiv 2306.15595, kexue.fm/archives/9675"

    def inverse_frequencies(self, head_dim: int, base: float, train_length: int | None) -> Theta:
        """θ_m / s."""
        return rope_frequencies(head_dim, base) / self.stretch


@register
class ABF(RopeScaling):
    """Adjusted base frequency: another rotary base."""

    equation = "θ'_m = base'^(−2m/d)"
    source = "arXiv 2309.16039"
    base: float = number(default=500000.0, above=1)

    def inverse_frequencies(self, head_dim: int, base: float, train_length: int | None) -> Theta:
        """base'^(−2m/d)."""
        return rope_frequencies(head_dim, self.base)


@register
class NTK(FactorScaling):
    """NTK-aware scaling: a larger base divides the lowest frequency by the factor.

    The highest frequency does not change. Also called NTK-fixed (kexue.fm/archives/9708).
    """

    equation = "θ'_m = (base·s^(d/(d−2)))^(−2m/d)"
    source = "kexue.fm/archives/9675, 9706"

    def inverse_frequencies(self, head_dim: int, base: float, train_length: int | None) -> Theta:
        """(base·s^(d/(d−2)))^(−2m/d); needs d ≥ 4."""
        if head_dim < 4:
            raise InputError(f"NTK needs a head dimension of at least 4, but it is {head_dim}")
        return rope_frequencies(head_dim, base * self.stretch ** (head_dim / (head_dim - 2)))


@register
class NTKOld(FactorScaling):
    """NTK-aware scaling as first proposed: the base times the factor; written NTK-old.

    The lowest frequency is divided by s^((d−2)/d), a little less than s.
    """

    equation = "θ'_m = (base·s)^(−2m/d)"
    source = "kexue.fm/archives/9675, 9708"

    def inverse_frequencies(self, head_dim: int, base: float, train_length: int | None) -> Theta:
        """(base·s)^(−2m/d)."""
        return rope_frequencies(head_dim, base * self.stretch)


@register
class NTKMixed(FactorScaling):
    """NTK-mixed: each frequency has its own base.

    b is 0.625 in the post, and 0.75 in its author's patch of Llama.
    """

    equation = "θ'_m = θ_m·exp(−a(m+1)^b), a = ln s/(d/2)^b"
    source = "kexue.fm/archives/9706"
    b: float = number(default=0.625, above=0)

    def inverse_frequencies(self, head_dim: int, base: float, train_length: int | None) -> Theta:
        """θ_m·exp(−a·(m+1)^b)."""
        # a·(m+1)^b as ln s · ((m+1)/(d/2))^b, which no b can overflow.
        half = head_dim // 2
        share = torch.arange(1, half + 1, dtype=torch.float64, device="cpu") / half
        return rope_frequencies(head_dim, base) * torch.exp(-math.log(self.stretch) * share**self.b)


@register
class DynamicNTK(RopeScaling):
    """NTK-aware scaling that grows by blocks of the training length.

    The L rows of a block share their frequencies, so prefill, decoding and one full forward pass
    agree; a cache stores unrotated keys. The first block has the trained frequencies, block b
    (0-based) those of NTK with the factor 1 + s·b. s is `factor`, by default 1, which stretches by
    exactly n / L. The factor of `resolve` is for scalings that depend on the longest text.
    """

    equation = "θ'_m = (base·(s·n/L − (s − 1))^(d/(d−2)))^(−2m/d), n = L·⌈(i + 1)/L⌉"
    source = "arXiv 2309.00071 (section 3.3), kexue.fm/archives/9708"
    used_by = "an option of many RoPE decoders in transformers"
    blockwise = True
    needs_length = True
    factor: float = number(default=1.0, above=0)

    def for_block(self, block: int, train_length: int) -> RopeScaling:
        """NTK with the factor 1 + s·block."""
        return NTK(1 + self.factor * block)


@register
class YaRN(FactorScaling):
    """Slow frequencies are interpolated, fast ones kept, and logits are sharper.

    θ_m is the frequency of feature pair m of d/2, s the `factor`, L the training length, λ the
    scale of the score. dim(r) = d·ln(L/(2πr))/(2·ln base) is the feature pair that rotates r times
    within L; low = ⌊dim(beta_fast)⌋, high = ⌈dim(beta_slow)⌉, both clamped to [0, d − 1] (equal:
    high + 0.001); t = clamp((m − low)/(high − low), 0, 1). The rotation does not change
    lengths: the factor enters λ once. `truncate=false` uses low and high without ⌊ ⌋ and ⌈ ⌉
    (gpt-oss); `sharpness` replaces 0.1 (0 in Ministral 3).
    """

    equation = (
        "θ'_m = t·θ_m/s + (1 − t)·θ_m, t from 0 (pairs that rotate beta_fast times within L) to 1 "
        "(beta_slow times), s = factor; λ ← λ·(sharpness·ln s + 1)²"
    )
    source = "arXiv 2309.00071"
    used_by = "DeepSeek-V3, gpt-oss; an option of Qwen2.5 and Qwen3"
    needs_length = True
    beta_fast: float = number(default=32.0, above=0)
    beta_slow: float = number(default=1.0, above=0)
    truncate: bool = True
    sharpness: float = number(default=0.1, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.beta_fast >= self.beta_slow, "beta_fast", "at least beta_slow")

    def inverse_frequencies(self, head_dim: int, base: float, train_length: int | None) -> Theta:
        """The blend of θ_m/s and θ_m by the ramp."""
        length = self.required_length(train_length)

        def dim(rotations: float) -> float:
            turns = length / (2 * math.pi * rotations)
            return head_dim * math.log(turns) / (2 * math.log(base))

        low, high = dim(self.beta_fast), dim(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = (float(min(max(x, 0), head_dim - 1)) for x in (low, high))
        high += 0.001 if high == low else 0.0
        m = torch.arange(head_dim // 2, dtype=torch.float64, device="cpu")
        ramp = ((m - low) / (high - low)).clamp(0, 1)
        theta = rope_frequencies(head_dim, base)
        return ramp * theta / self.stretch + (1 - ramp) * theta

    def gain(self, train_length: int | None) -> float:
        """(sharpness·ln s + 1)²: the paper scales queries and keys, the logit takes the square."""
        return (self.sharpness * math.log(self.stretch) + 1) ** 2


@register
class Llama3(FactorScaling):
    """The frequencies of Llama 3.1: interpolated by the rotations within L.

    L·θ_m/2π is how often pair m rotates within the training length. Pairs that rotate less than
    `low` times are interpolated; those that rotate more than `high` times are kept.
    """

    equation = "θ'_m = (1 − t)·θ_m/s + t·θ_m, t = clamp((L·θ_m/2π − low)/(high − low), 0, 1)"
    source = "arXiv 2407.21783; github.com/meta-llama/llama-models"
    used_by = "Llama 3.1, 3.2 and 3.3"
    needs_length = True
    low: float = number(default=1.0, above=0)
    high: float = number(default=4.0, above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.high > self.low, "high", "a number above low")

    def inverse_frequencies(self, head_dim: int, base: float, train_length: int | None) -> Theta:
        """The blend of θ_m/s and θ_m by the number of rotations."""
        theta = rope_frequencies(head_dim, base)
        rotations = theta * (self.required_length(train_length) / (2 * math.pi))
        ramp = ((rotations - self.low) / (self.high - self.low)).clamp(0, 1)
        return (1 - ramp) * theta / self.stretch + ramp * theta


@register
class LongRoPE(FactorScaling):
    """A searched divisor for each frequency, and sharper logits.

    `factors` are λ_0 … λ_{d/2−1}, found by the paper's search and shipped with a model, written as
    1:1.2:4. Without them λ_m = s^(2m/(d−2)), as in NTK, one of the starting points of that search.
    The paper multiplies cos and sin by √(1 + ln s/ln L), which multiplies the logit by the square.
    The first n̂ tokens, which the paper leaves unstretched, are not treated separately.
    """

    equation = "θ'_m = θ_m/λ_m; λ ← λ·(1 + ln s/ln L)"
    source = "arXiv 2402.13753"
    used_by = "Phi-3 and Phi-4-mini, long-context releases"
    needs_length = True
    factors: tuple[float, ...] | None = field(default=None, metadata={"optional": True})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factors is not None:
            valid = all(math.isfinite(factor) and factor > 0 for factor in self.factors)
            self.require(valid and bool(self.factors), "factors", "numbers above 0, like 1:1.2:4")

    def inverse_frequencies(self, head_dim: int, base: float, train_length: int | None) -> Theta:
        """θ_m/λ_m; needs d/2 factors, or d ≥ 4 without them."""
        theta = rope_frequencies(head_dim, base)
        half = head_dim // 2
        if self.factors is None:
            if head_dim < 4:
                raise InputError(
                    f"LongRoPE needs factors=… where the head dimension is below 4: {head_dim}"
                )
            m = torch.arange(half, dtype=torch.float64, device="cpu")
            return theta * self.stretch ** (-m / (half - 1))
        if len(self.factors) != half:
            raise InputError(
                f"LongRoPE needs one factor for each of the {half} pairs that rotate, but it has "
                f"{len(self.factors)}"
            )
        return theta / torch.tensor(self.factors, dtype=torch.float64, device="cpu")

    def gain(self, train_length: int | None) -> float:
        """1 + ln s/ln L."""
        return 1 + math.log(self.stretch) / math.log(self.required_length(train_length))


@register
class ClippedRoPE(RopeScaling):
    """Frequencies that do not rotate once within L taper off to 0.

    "CoPE: Clipped RoPE" (the authors' modeling_cope.py). `clip` c defaults to the pairs that do not
    rotate once within the training length, 2π/θ_m > L, as the paper defines them; the authors'
    Llama 3 file has c = 20 where this rule gives 29. The first of the c pairs keeps its frequency,
    the last does not rotate; c = 1 changes nothing.
    """

    equation = "θ'_{d/2−c+t} = θ·½(1 + cos(π·t/(c−1))), t = 0 … c−1"
    source = "arXiv 2602.05258; github.com/hrlics/CoPE"
    clip: int | None = number(default=None, least=0, optional=True)

    def missing(self, train_length: int | None) -> str | None:
        """The number of pairs, unless the training length gives it."""
        return "clip" if self.clip is None and train_length is None else None

    def inverse_frequencies(self, head_dim: int, base: float, train_length: int | None) -> Theta:
        """θ_m, the last c of them tapered."""
        theta = rope_frequencies(head_dim, base)
        clip = self.clip
        if clip is None:
            clip = int((theta * self.required_length(train_length) < 2 * math.pi).sum())
        clip = min(clip, theta.numel())
        taper = torch.linspace(0, math.pi, clip, dtype=torch.float64, device="cpu").cos().add(1) / 2
        return torch.cat((theta[: theta.numel() - clip], theta[theta.numel() - clip :] * taper))


@register
class DroPE(RopeScaling):
    """Positions are dropped after training; the model then needs some more training.

    The method works because the paper then trains briefly without positions; use this component for
    that training too. It does not include the paper's softmax temperature for long text: add logn+.
    """

    equation = "θ'_m = 0, so P = 1"
    source = "arXiv 2512.12167"

    def conflict(self, parts: Parts) -> str | None:
        """XPos has a decay that would remain."""
        position = parts.get(Slot.POSITION)
        if isinstance(position, RotaryPosition) and position.log_growth(2) is not None:
            return self.refusal(position, f"{position.name} is still a position, by its decay")
        return None

    def inverse_frequencies(self, head_dim: int, base: float, train_length: int | None) -> Theta:
        """All 0."""
        return torch.zeros(head_dim // 2, dtype=torch.float64, device="cpu")

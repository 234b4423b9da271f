"""Residual components: scores, queries and keys, or values that a layer takes from those below."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from normattn.score.parts.base import Part, Parts, Slot, number, register
from normattn.score.parts.long_context import blockwise
from normattn.score.parts.masks_and_layouts import Layout


@dataclass(frozen=True)
class ResidualPart(Part):
    """What a layer takes from the layers below: scores, features (q and k), or values.

    `values`: values are added up along with the features.
    """

    slot = Slot.RESIDUAL
    summed: ClassVar[Literal["scores", "features", "values"]]
    values: ClassVar[bool] = False
    excludes: ClassVar[Mapping[Slot, str]] = {
        Slot.REMAPPING: "residual scores add one score per pair, but it uses two kinds of "
        "relative positions or hides keys"
    }

    @property
    def mean(self) -> bool:
        """Whether softmax gets the mean over the layers so far instead of the sum."""
        return bool(getattr(self, "running_mean", False))

    def conflict(self, parts: Parts) -> str | None:
        """Every layer must have one product per pair, over the same pairs."""
        layout, blocks = parts.get(Slot.LAYOUT), blockwise(parts)
        if Slot.REMAPPING not in parts and blocks is not None:
            why = "its frequencies change with each block of rows, so scores do not add up"
            return self.refusal(blocks, why)
        if isinstance(layout, Layout) and (not layout.uniform or Slot.WINDOW in parts):
            why = "some layers would see keys for which the layers below have no scores"
            return self.refusal(layout, why)
        return super().conflict(parts)


@register
class RealFormer(ResidualPart):
    """Scores are added up over the layers.

    Only the products are added up; masks, biases, caps and sinks are applied afterwards in every
    layer. With `running_mean` softmax gets s_n / n, the mean over the layers so far.
    """

    equation = "s_n = λ·⟨q_n, k_n⟩ + s_{n−1} (running_mean: s_n/n)"
    source = "arXiv 2012.11747"
    summed = "scores"
    running_mean: bool = False


@register
class ResidualQK(ResidualPart):
    """Queries and keys are added up over the layers.

    They are already normalised, scaled and rotated. Unlike RealFormer's sum, this one includes
    products of one layer's queries with another layer's keys. Any kernel can compute it.
    """

    equation = "s_n = ⟨Σ_m λ q_m, Σ_m k_m⟩, m ≤ n"
    source = "kexue.fm/archives/8027 (eq. 3)"
    summed = "features"


@register
class ResidualQKV(ResidualPart):
    """Queries, keys and values are added up over the layers.

    `ResidualQK` with the layers' values added up as well, as readers of the post suggest.
    """

    equation = "s_n = ⟨Σ_m λ q_m, Σ_m k_m⟩, read from Σ_m v_m, m ≤ n"
    source = "kexue.fm/archives/8027 (comments)"
    summed = "features"
    values = True


@register
class ValueResidual(ResidualPart):
    """Values are mixed with those of the lowest layer.

    So values of the lowest layer, which are closest to the tokens, reach every layer. Scores do not
    change. `share` is μ, ½ in the authors' code.
    """

    equation = "v_n = μ·v_1 + (1 − μ)·v_n, n > 1"
    source = "arXiv 2410.17897; github.com/Zcchill/Value-Residual-Learning"
    summed = "values"
    share: float = number(default=0.5, above=0, below=1)

    def conflict(self, parts: Parts) -> str | None:
        """Layers may see different keys, but each must compute all rows in one block."""
        blocks = blockwise(parts)
        why = "its keys are rotated again for each block of rows"
        return None if blocks is None else self.refusal(blocks, why)

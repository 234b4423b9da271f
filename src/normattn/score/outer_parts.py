"""The kinds of parts around the product of queries and keys: what is added, bounded, hidden, gated.

Legend: H query heads, R distances.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels import Visibility
from normattn.kernels.problem import PairBias
from normattn.score.folded_parts import ChunkRulesPart, SpectrumPart
from normattn.score.part import Part, Slot, When


@dataclass(frozen=True)
class CarryPart(Part):
    """What a layer takes over from the layers below it: their scores, or their q and k.

    `values`: with the features also their values.
    """

    slot: ClassVar[Slot] = Slot.CARRY
    when: ClassVar[When] = "trained-in"
    carries: ClassVar[Literal["scores", "features"]]
    values: ClassVar[bool] = False

    @property
    def mean(self) -> bool:
        """Whether what is carried counts as a mean over the layers instead of a sum."""
        return False

    def conflict(self, parts: Mapping[Slot, Part]) -> str | None:
        """One product per pair, over the same pairs in every layer."""
        spectrum, layout = parts.get(Slot.SPECTRUM), parts.get(Slot.LAYOUT)
        if Slot.REGIME in parts:
            return (
                f"{self.name} and {parts[Slot.REGIME].name} cannot be combined: {self.name} "
                "carries one score per pair up through the layers, not two regimes or a window "
                "with a start"
            )
        if isinstance(spectrum, SpectrumPart) and spectrum.moving:
            return (
                f"{self.name} and {spectrum.name} cannot be combined: {spectrum.name} reads rows "
                f"in blocks with keys of their own, and {self.name} carries those of all rows at "
                "once"
            )
        if isinstance(layout, LayoutPart) and (not layout.uniform or Slot.VISIBLE in parts):
            return (
                f"{self.name} and {layout.name} cannot be combined: some layers would see keys "
                f"that those below do not, whose scores {self.name} then lacks"
            )
        return None


@dataclass(frozen=True)
class BiasPart(Part):
    """A bias b(h, |i − j|) of head h, added to the score."""

    slot: ClassVar[Slot] = Slot.BIAS
    when: ClassVar[When] = "trained-in"

    def learned(self, heads: int, head_dim: int) -> dict[str, Tensor]:
        """The initial values of what is learned, by name; empty where nothing is."""
        return {}

    def project(self, learned: Mapping[str, Tensor]) -> None:
        """Put learned values back into their range, in place, after an optimiser's step.

        `values` keeps to the range by itself: nothing else calls this than a training loop.
        """

    def values(
        self, distance: Float[Tensor, " r"], heads: int, learned: Mapping[str, Tensor]
    ) -> Float[Tensor, "h r"]:
        """b(h, r) for every head and distance."""
        raise InputError(f"{self.name} defines no values")


@dataclass(frozen=True)
class PairBiasPart(BiasPart):
    """A bias b(h, i, j) that is no function of the distance alone; causal attention only.

    `reads_queries`: it is made of λ(i)·N_q(q_i), not rotated.
    """

    needs_causal: ClassVar[bool] = True
    reads_queries: ClassVar[bool] = False

    def pairs(
        self,
        learned: Mapping[str, Tensor],
        dtype: torch.dtype,
        query: Float[Tensor, "b h t d"] | None,
    ) -> PairBias:
        """The bias of all pairs, computed in `dtype`; `query` is None where none are read."""
        raise InputError(f"{self.name} defines no pairs")


@dataclass(frozen=True)
class ForgetPart(Part):
    """A bias that sums up a gate of every token between the key and the query."""

    slot: ClassVar[Slot] = Slot.BIAS
    when: ClassVar[When] = "trained-in"
    needs_causal: ClassVar[bool] = True


@dataclass(frozen=True)
class NormaliserPart(Part):
    """How a row of scores becomes weights, in place of softmax."""

    slot: ClassVar[Slot] = Slot.NORMALISER
    when: ClassVar[When] = "trained-in"

    def weights(
        self, score: Float[Tensor, "b h t s"], seen: Visibility
    ) -> Float[Tensor, "b h t s"]:
        """The weights of whole rows; a score is −∞, and its weight 0, where a key is hidden."""
        raise InputError(f"{self.name} defines no weights")

    def conflict(self, parts: Mapping[Slot, Part]) -> str | None:
        """No sink: there is no denominator."""
        if Slot.SINK in parts:
            sink = parts[Slot.SINK].name
            return f"{sink} and {self.name} cannot be combined: a sink is a logit of softmax"
        return None


@dataclass(frozen=True)
class SelectionPart(Part):
    """What earlier queries took from a key is subtracted from its scores (`kernels.Selection`)."""

    slot: ClassVar[Slot] = Slot.NORMALISER
    when: ClassVar[When] = "trained-in"
    needs_causal: ClassVar[bool] = True

    def conflict(self, parts: Mapping[Slot, Part]) -> str | None:
        """One score per pair, of all rows in their order."""
        spectrum, regime = parts.get(Slot.SPECTRUM), parts.get(Slot.REGIME)
        moving = isinstance(spectrum, SpectrumPart) and spectrum.moving
        blocks = spectrum if moving else regime if isinstance(regime, ChunkRulesPart) else None
        if blocks is None:
            return None
        return (
            f"{self.name} and {blocks.name} cannot be combined: {blocks.name} reads rows in "
            f"blocks, and {self.name} hands on from each row to the next"
        )


@dataclass(frozen=True)
class DifferencePart(Part):
    """One output of two heads and both their values, in place of an output of each head."""

    slot: ClassVar[Slot] = Slot.NORMALISER
    when: ClassVar[When] = "trained-in"

    def learned(self, head_dim: int) -> dict[str, Tensor]:
        """The initial values of what is learned, by name."""
        raise InputError(f"{self.name} defines nothing learned")

    def joined(
        self,
        first: Float[Tensor, "b p t e"],
        second: Float[Tensor, "b p t e"],
        learned: Mapping[str, Tensor],
    ) -> Float[Tensor, "b p t e"]:
        """The output of P pairs of heads, made of those of their first and second heads."""
        raise InputError(f"{self.name} defines no difference")


@dataclass(frozen=True)
class CapPart(Part):
    """A bound on the product: cap·tanh(s/cap)."""

    slot: ClassVar[Slot] = Slot.CAP
    when: ClassVar[When] = "trained-in"
    cap: float = 50.0


@dataclass(frozen=True)
class SinkPart(Part):
    """One more logit per head in the denominator of softmax, learned, starting at 0."""

    slot: ClassVar[Slot] = Slot.SINK
    when: ClassVar[When] = "trained-in"


@dataclass(frozen=True)
class GatePart(Part):
    """What a layer multiplies each head's output with: a gate for each feature, or for the head.

    `act` makes the gate of its logits.
    """

    slot: ClassVar[Slot] = Slot.GATE
    when: ClassVar[When] = "trained-in"
    per: Literal["feature", "head"] = "feature"
    act: Literal["sigmoid", "softplus"] = "sigmoid"


@dataclass(frozen=True)
class VisiblePart(Part):
    """A window outside of which keys are hidden, trained in."""

    slot: ClassVar[Slot] = Slot.VISIBLE
    when: ClassVar[When] = "trained-in"
    window: int | None = None


@dataclass(frozen=True)
class ChunkPart(Part):
    """Chunks of positions, outside of which keys are hidden, trained in."""

    slot: ClassVar[Slot] = Slot.VISIBLE
    when: ClassVar[When] = "trained-in"
    size: int | None = None


@dataclass(frozen=True)
class DocumentsPart(Part):
    """Keys of other documents are hidden; positions count from the document's first token."""

    slot: ClassVar[Slot] = Slot.DOCUMENTS
    when: ClassVar[When] = "trained-in"
    separator: int = 0


@dataclass(frozen=True)
class LayoutPart(Part):
    """Different scores in different layers of a model.

    `stretchable`: whether post-hoc methods apply; `uniform`: whether all layers see the same keys
    (beside a window named as well).
    """

    slot: ClassVar[Slot] = Slot.LAYOUT
    when: ClassVar[When] = "trained-in"
    stretchable: ClassVar[bool] = True
    uniform: ClassVar[bool] = True

    def layer(
        self, parts: Mapping[Slot, Part], layer: int, layers: int, train_length: int | None
    ) -> Iterable[Part]:
        """The parts of layer `layer` (0-based) of `layers`, from those of the whole, less this."""
        raise InputError(f"{self.name} defines no layers")

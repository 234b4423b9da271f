"""FoX: a forgetting gate, a bias that the tokens themselves make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from normattn.score.outer_parts import ForgetPart
from normattn.score.part import Part, Slot
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class FoX(ForgetPart):
    """b(i, j) = Σ_{j<l≤i} ln σ(w_h·x_l + c_h), x the layer's input (arXiv 2503.02130). Causal only.

    It is a position of its own: NoPE unless RoPE is named. It folds into queries and keys as
    features more: with C_j = Σ_{l≤j} ln σ(…) the score is ⟨(q, C_i, 1), (k, 1, −C_j)⟩. w and c
    belong to the layers `Attention` and `GatedAttentionUnit`; `attention` takes w_h·x_l + c_h as
    its argument `forget`.
    """

    name: ClassVar[str] = "FoX"
    summary: ClassVar[str] = "a penalty by the tokens between, each with a gate of its input"
    equation: ClassVar[str] = "b = Σ_{j<l≤i} ln σ(w_h·x_l + c_h)"
    source: ClassVar[str] = "arXiv 2503.02130; github.com/zhixuan-lin/forgetting-transformer"

    def conflict(self, parts: Mapping[Slot, Part]) -> str | None:
        """What does not leave the bias alone."""
        for slot, why in (
            (Slot.CAP, "the bias would be capped with the product it is folded into"),
            (Slot.CARRY, "what is carried up would hold the bias of the layers below"),
        ):
            if slot in parts:
                return f"FoX and {parts[slot].name} cannot be combined: {why}"
        return None

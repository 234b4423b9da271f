"""StickBreaking: the nearest keys take their share first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from normattn.kernels import Visibility
from normattn.score.outer_parts import NormaliserPart
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class StickBreaking(NormaliserPart):
    """A(i, j) = σ(s(i, j)) · Π_{j<l<i} (1 − σ(s(i, l))), j < i (arXiv 2410.17980). Causal only.

    Each key breaks its share off what the keys between it and the query have left of a stick of
    length 1. The query's own key gets none, so the first token's output is 0; with `current` it
    breaks off first. What is left of the stick goes nowhere. Order is a position of its own: name
    NoPE for the paper's score.
    """

    name: ClassVar[str] = "StickBreaking"
    summary: ClassVar[str] = "each key takes a share of what nearer keys leave, instead of softmax"
    equation: ClassVar[str] = "A(i,j) = σ(s_ij) · Π_{j<l<i} (1 − σ(s_il)), j < i"
    source: ClassVar[str] = "arXiv 2410.17980"
    needs_causal: ClassVar[bool] = True
    current: bool = False

    def weights(
        self, score: Float[Tensor, "b h t s"], seen: Visibility
    ) -> Float[Tensor, "b h t s"]:
        """In logarithms, summed from each key up to the query."""
        every = slice(None)
        if not self.current:
            score = score.masked_fill(seen.distance(every, every) == 0, -float("inf"))
        # What is between two tokens is told by those of one text.
        order = seen.by_position(score)
        ranked = score if order is None else score.gather(-1, order)
        wide = ranked.float() if ranked.element_size() == 2 else ranked
        left = F.logsigmoid(-wide).flip(-1).cumsum(-1).flip(-1)
        # From the last key down to each one, itself not counted.
        between = F.pad(left[..., 1:], (0, 1))
        weight = (F.logsigmoid(wide) + between).exp().to(score.dtype)
        return weight if order is None else weight.gather(-1, order.argsort(-1))

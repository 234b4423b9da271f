"""What the layers of a stack know of the tokens that they read.

Legend: B batch, S tokens in all.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Int
from torch import Tensor

from normattn.layers.carry import Carry


@dataclass(frozen=True)
class Reading:
    """What the layers must know of all S tokens; None where tokens are simply counted.

    `causal`: a token sees those before it and itself only. `carry` is what one layer hands to the
    next of its scores; the stack makes one for every forward pass. `backend` names the kernel.
    """

    key_padding: Bool[Tensor, "b s"] | None = None
    positions: Int[Tensor, "b s"] | None = None
    documents: Int[Tensor, "b s"] | None = None
    causal: bool = True
    carry: Carry | None = None
    backend: str = "auto"

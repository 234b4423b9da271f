"""What the layers of a stack know of the tokens that they read.

Legend: B batch, S tokens in all.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Int
from torch import Tensor

from normattn.layers.residual_scores import ResidualLayer


@dataclass(frozen=True)
class Reading:
    """What the layers must know of all S tokens; None where tokens are simply counted.

    `causal`: a token sees those before it and itself only. `residual` is what the
    layers below hand on to this one. `backend` names the kernel.
    """

    key_padding: Bool[Tensor, "b s"] | None = None
    positions: Int[Tensor, "b s"] | None = None
    documents: Int[Tensor, "b s"] | None = None
    causal: bool = True
    residual: ResidualLayer | None = None
    backend: str = "auto"

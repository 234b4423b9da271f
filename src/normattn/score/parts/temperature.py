"""Temperature: logits sharpened in steps of a length."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.score.folded_parts import LogNPart
from normattn.score.part import When
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class Temperature(LogNPart):
    """λ · (1 + β·ln(1 + ⌊(i + shift)/L₀⌋)), `beta` β, `length` L₀, the training length by default.

    Ministral 3 has shift = 0, Llama 4 shift = 1 and has it on its layers without positions alone
    (`IRoPE(beta=…, length=…)`). i is n − 1, the keys that a causal query sees before its own; not
    causal, all queries see n keys and have the scale of the last.
    """

    name: ClassVar[str] = "Temperature"
    summary: ClassVar[str] = "logits sharpened by the logarithm of the position, in steps"
    equation: ClassVar[str] = "λ ← λ · (1 + β·ln(1 + ⌊(i + shift)/L₀⌋))"
    source: ClassVar[str] = "transformers: ministral3, llama4"
    used_by: ClassVar[str] = "Ministral 3, Llama 4"
    when: ClassVar[When] = "trained-in"
    beta: float = 0.1
    length: int | None = None
    shift: int = 0

    def __post_init__(self) -> None:
        self.require(math.isfinite(self.beta) and self.beta >= 0, "beta", "a number of at least 0")
        self.require(self.length is None or self.length >= 1, "length", "at least 1")
        self.require(self.shift in (0, 1), "shift", "0 or 1")

    def resolved(self, train_length: int | None, factor: float | None) -> Temperature:
        """L₀ = L where it is not given."""
        return self if self.length is not None else replace(self, length=train_length)

    def missing(self, train_length: int | None) -> str | None:
        """The length of a step."""
        return "length" if self.length is None and train_length is None else None

    def factor(self, n: Float[Tensor, "..."], train_length: int | None) -> Float[Tensor, "..."]:
        """1 + β·ln(1 + ⌊(n − 1 + shift)/L₀⌋)."""
        if self.length is None:
            raise InputError("Temperature needs length=…, the tokens between two steps")
        return 1 + self.beta * ((n - 1 + self.shift) / self.length).floor().log1p()

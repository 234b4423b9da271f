"""SelfExtend: distant positions in groups."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.score.folded_parts import RegimePart
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class SelfExtend(RegimePart):
    """Relative position i − j for i − j < w, ⌊i/G⌋ − ⌊j/G⌋ + w − ⌊w/G⌋ beyond (arXiv 2401.01325).

    `window` w defaults to L // 4, `group` G to the smallest by which the longest text, factor·L
    tokens, meets no position from L on. G = 1 is RoPE. Causal only.
    """

    name: ClassVar[str] = "SelfExtend"
    summary: ClassVar[str] = "beyond a window positions are shared by groups of tokens"
    equation: ClassVar[str] = "s = ⟨R^ρ q, k⟩, ρ = i−j for i−j < w, else ⌊i/G⌋ − ⌊j/G⌋ + w − ⌊w/G⌋"
    source: ClassVar[str] = "arXiv 2401.01325"
    group: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None:
            self.require(self.window >= 1, "window", "at least 1")
        if self.group is not None:
            self.require(self.group >= 1, "group", "at least 1")

    def resolved(self, train_length: int | None, factor: float | None) -> SelfExtend:
        """window = L // 4, and the smallest group that fits factor·L into L, where not given."""
        window, group = self.window, self.group
        if train_length is None:
            return self
        window = max(1, train_length // 4) if window is None else window
        if group is None and factor is not None and window < train_length:
            group = _smallest_group(math.ceil(factor * train_length), window, train_length)
        return dataclasses.replace(self, window=window, group=group)

    def far_positions(
        self, query: Float[Tensor, "*bq t"], key: Float[Tensor, "*bk s"]
    ) -> tuple[Float[Tensor, "*bq t"], Float[Tensor, "*bk s"]]:
        """Queries at ⌊i/G⌋ + w − ⌊w/G⌋, keys at ⌊j/G⌋."""
        if self.window is None or self.group is None:
            raise InputError("SelfExtend needs window=… and group=…")
        shift = self.window - self.window // self.group
        return (
            torch.div(query, self.group, rounding_mode="floor") + shift,
            torch.div(key, self.group, rounding_mode="floor"),
        )


def _smallest_group(longest: int, window: int, train_length: int) -> int:
    """The smallest G with ⌊(longest − 1)/G⌋ + w − ⌊w/G⌋ < L."""
    group, last = 1, longest - 1
    while last // group + window - window // group >= train_length:
        # Nothing changes before one of the two quotients does.
        group = min(n // (n // group) + 1 for n in (last, window) if n // group)
    return group

"""LeakyReRoPE: relative positions that grow more slowly beyond a window."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.score.folded_parts import RegimePart
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class LeakyReRoPE(RegimePart):
    """Relative position r = i − j for r < w and w + (r − w)/s beyond (kexue.fm/archives/9731).

    Far queries stand at (i + w(s − 1))/s, far keys at j/s. `window` w defaults to L // 4, `s` to
    (factor·L − w)/(L − w): the longest text then fits exactly into L. s = 1 is RoPE, s → ∞ ReRoPE.
    Causal only.
    """

    name: ClassVar[str] = "LeakyReRoPE"
    summary: ClassVar[str] = "relative positions that grow more slowly beyond a window"
    equation: ClassVar[str] = "s = ⟨R^ρ q, k⟩, ρ = i−j for i−j < w, else w + (i−j−w)/s"
    source: ClassVar[str] = "kexue.fm/archives/9731"
    s: float | None = None

    def __post_init__(self) -> None:
        if self.window is not None:
            self.require(self.window >= 1, "window", "at least 1")
        if self.s is not None:
            self.require(math.isfinite(self.s) and self.s >= 1, "s", "a number of at least 1")

    def resolved(self, train_length: int | None, factor: float | None) -> LeakyReRoPE:
        """window = L // 4, and the s by which factor·L fits into L, where none was given."""
        window, s = self.window, self.s
        if train_length is None:
            return self
        window = max(1, train_length // 4) if window is None else window
        if s is None and factor is not None and window < train_length:
            s = (factor * train_length - window) / (train_length - window)
        return dataclasses.replace(self, window=window, s=s)

    def far_positions(
        self, query: Float[Tensor, "*bq t"], key: Float[Tensor, "*bk s"]
    ) -> tuple[Float[Tensor, "*bq t"], Float[Tensor, "*bk s"]]:
        """Queries at (i + w(s − 1))/s, keys at j/s."""
        if self.window is None or self.s is None:
            raise InputError("LeakyReRoPE needs window=… and s=…")
        return (query + self.window * (self.s - 1)) / self.s, key / self.s

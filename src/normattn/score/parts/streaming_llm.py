"""StreamingLLM: the first tokens and a window of recent ones."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.score.folded_parts import RegimePart
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class StreamingLLM(RegimePart):
    """The first `sinks` keys and those with i − j < w are seen (arXiv 2309.17453).

    Positions are those within the cache of sinks + w tokens: a sink that has left the window is
    read by a query at min(i, sinks + w − 1). `window` w defaults to L − sinks (at least 1), so
    that no position passes the trained ones. Nothing changes up to sinks + w tokens. Causal only.
    """

    name: ClassVar[str] = "StreamingLLM"
    summary: ClassVar[str] = "only the first tokens and a window of recent ones are seen"
    equation: ClassVar[str] = (
        "j < sinks or i−j < w; s = ⟨R^ρ q, k⟩, ρ = i−j for i−j < w, else min(i, sinks+w−1) − j"
    )
    source: ClassVar[str] = "arXiv 2309.17453"
    sinks: int = 4

    def __post_init__(self) -> None:
        self.require(self.sinks >= 0, "sinks", "at least 0")
        if self.window is not None:
            self.require(self.window >= 1, "window", "at least 1")

    def resolved(self, train_length: int | None, factor: float | None) -> StreamingLLM:
        """window = L − sinks where none was given."""
        if self.window is None and train_length is not None:
            return dataclasses.replace(self, window=max(1, train_length - self.sinks))
        return self

    def far_positions(
        self, query: Float[Tensor, "*bq t"], key: Float[Tensor, "*bk s"]
    ) -> tuple[Float[Tensor, "*bq t"], Float[Tensor, "*bk s"]]:
        """Queries at min(i, sinks + w − 1), keys where they are."""
        if self.window is None:
            raise InputError("StreamingLLM needs window=…, or a training length to take it from")
        return query.clamp(max=self.sinks + self.window - 1), key

    def visible(self) -> tuple[int | None, int]:
        """The window, and the sinks beyond it."""
        return self.window, self.sinks

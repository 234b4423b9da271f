"""Sources that an encoder has read, as a decoder reads them.

Legend: B sources, S source tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxtyping import Bool, Float, Int
from torch import Tensor

from normattn.layers.cross_attention import Memory


@dataclass(frozen=True)
class Encoded:
    """Sources as the decoder reads them.

    `hidden` is the encoder's output, `padding` True where a token is padding (None: nowhere),
    `memories` the keys and values of each decoder block's cross attention.
    """

    hidden: Float[Tensor, "b s d"]
    padding: Bool[Tensor, "b s"] | None
    memories: tuple[Memory, ...]

    def choose(self, rows: Int[Tensor, " r"]) -> Encoded:
        """Source i becomes the old source rows[i]; sources may repeat or lack."""
        return replace(
            self,
            hidden=self.hidden[rows],
            padding=None if self.padding is None else self.padding[rows],
            memories=tuple(memory.choose(rows) for memory in self.memories),
        )

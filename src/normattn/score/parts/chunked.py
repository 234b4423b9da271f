"""Chunked: only keys of the query's own chunk are seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from normattn.score.outer_parts import ChunkPart
from normattn.score.part import Part, Slot
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class Chunked(ChunkPart):
    """Keys with ⌊i/c⌋ = ⌊j/c⌋ are seen (Llama 4, in its layers with positions).

    `size` c defaults to L // 4. i, j and n count from the start of the text all the same.
    """

    name: ClassVar[str] = "Chunked"
    summary: ClassVar[str] = "only keys of the query's own chunk of tokens are seen"
    equation: ClassVar[str] = "j is seen by i where ⌊i/c⌋ = ⌊j/c⌋"
    source: ClassVar[str] = "transformers: llama4"
    used_by: ClassVar[str] = "Llama 4"

    def __post_init__(self) -> None:
        self.require(self.size is None or self.size >= 1, "size", "at least 1")

    def resolved(self, train_length: int | None, factor: float | None) -> Chunked:
        """size = L // 4 where none was given."""
        if self.size is None and train_length is not None:
            return dataclasses.replace(self, size=max(1, train_length // 4))
        return self

    def conflict(self, parts: Mapping[Slot, Part]) -> str | None:
        """No second way of cutting a row, and nothing beyond the chunk."""
        for slot, why in (
            (Slot.REGIME, "no relative position passes the chunk"),
            (Slot.DOCUMENTS, "both cut a row into pieces"),
        ):
            if slot in parts:
                return f"{parts[slot].name} cannot be combined with Chunked: {why}"
        return None

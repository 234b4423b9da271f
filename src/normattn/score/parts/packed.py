"""Packed: documents in one row that do not see each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from normattn.score.outer_parts import DocumentsPart
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class Packed(DocumentsPart):
    """Keys of other documents are hidden; i, j and n count from the document's first token.

    `attention` takes the number of each key's document, a document being a run of one number; a
    model finds documents by the token `separator`.
    """

    name: ClassVar[str] = "Packed"
    summary: ClassVar[str] = "documents packed into one row do not see each other"
    equation: ClassVar[str] = "j is seen by i where doc(i) = doc(j)"
    source: ClassVar[str] = "arXiv 2107.02027, 2407.21783"

    def __post_init__(self) -> None:
        self.require(self.separator >= 0, "separator", "at least 0")

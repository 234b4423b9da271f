"""A document with the relations it states, and three splits of such documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from normattn.data.splits import SplitName


@dataclass(frozen=True)
class RelationDocument:
    """One text, its name (unique inside its corpus) and the labels present, sorted, each once."""

    name: str
    text: str
    labels: tuple[str, ...]


@dataclass(frozen=True)
class RelationCorpus:
    """Documents by split, and every label that a document may have, in the order of the outputs.

    A label that no training document has can only be missed; it still counts.
    """

    splits: Mapping[SplitName, tuple[RelationDocument, ...]]
    labels: tuple[str, ...]

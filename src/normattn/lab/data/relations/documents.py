"""A document with the relations it states, and three splits of such documents."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from normattn.lab.data.relations.config import RelationConfig
from normattn.lab.data.sources import Registry, Source
from normattn.lab.data.splits import SplitName


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


class RelationSource(Source):
    """A relation corpus; `RelationConfig.corpus` is the address of one."""

    @classmethod
    @abstractmethod
    def parse(cls, body: str) -> RelationSource:
        """Build the source of an address."""

    @abstractmethod
    def read(self, config: RelationConfig) -> RelationCorpus:
        """The documents; `InputError` where they are missing or damaged."""

    def look(self) -> None:
        """Raise `InputError` where its files are not there; quick, none is read."""


RELATIONS = Registry[RelationSource](
    "relation corpus", "python-imports or a folder with train, dev and test files"
)

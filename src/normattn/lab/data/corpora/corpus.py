"""What a corpus is: a value that names some text and can read it again, document by document."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from normattn.lab.data.sources import Registry, Source


@dataclass(frozen=True)
class Document:
    """One piece of text, its name (unique inside its corpus), and what places it in a split.

    Documents of one `group` stand in one split; without a group a document is its own.
    """

    name: str
    text: str
    group: str | None = None

    @property
    def split_name(self) -> str:
        """The name by which the split is decided."""
        return self.name if self.group is None else self.group


class Corpus(Source):
    """Some text, as a value: `str(corpus)` parses back to an equal one.

    Text is always streamed: a corpus may be larger than the memory.
    """

    @classmethod
    @abstractmethod
    def parse(cls, body: str, options: Mapping[str, str]) -> Corpus:
        """Build the corpus of an address; `InputError` for an option it does not know."""

    @abstractmethod
    def documents(self, limit: int | None = None) -> Iterator[Document]:
        """Yield the documents in a fixed order, at most `limit` bytes of text in all.

        Raises `InputError` where the text is missing, unreadable or not UTF-8.
        """

    @abstractmethod
    def total_bytes(self) -> int | None:
        """About how many bytes of text there are; None when that is only known at the end."""

    def sources(self) -> dict[str, str]:
        """What the text was taken from, each with its version; empty where nothing is versioned."""
        return {}

    def notes(self) -> tuple[str, ...]:
        """What a plan says of the corpus before anything is done: what is fetched, what it needs.

        Raises `InputError` where a library that it needs is not installed.
        """
        return ()

    @abstractmethod
    def __str__(self) -> str: ...


CORPORA = Registry[Corpus](
    "corpus",
    "python-source, python-packages-2026, python-packages, the path of a file or folder, or "
    "hf:NAME",
)

"""What sentence pairs are read from: a value that names them and can read them again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeVar

from normattn.data.splits import SplitName
from normattn.errors import InputError


class Pair(NamedTuple):
    """A sentence and its translation; `split` where the corpus itself says to which it belongs."""

    source: str
    target: str
    split: SplitName | None = None


@dataclass(frozen=True)
class Languages:
    """From which language into which; two of one language are refused."""

    source: str
    target: str

    def __post_init__(self) -> None:
        if self.source == self.target:
            raise InputError(
                f"the pairs are to be translated from {self.source!r} into {self.target!r}: "
                "name two languages"
            )


class PairSource(ABC):
    """Sentence pairs, streamed in a fixed order.

    Subclasses are frozen dataclasses, one kind in one file, and register themselves with
    `register`; a kind is asked for by the address in `PairsConfig.corpus`.
    """

    kind: ClassVar[str]
    summary: ClassVar[str]

    @classmethod
    @abstractmethod
    def claims(cls, body: str) -> bool:
        """Whether `body` (the address before its `?`) is of this kind."""

    @classmethod
    @abstractmethod
    def parse(cls, body: str, options: Mapping[str, str], languages: Languages) -> PairSource:
        """Build the source of an address; `InputError` for an option it does not know."""

    @abstractmethod
    def pairs(self) -> Iterator[Pair]:
        """Yield every pair; raises `InputError` where they are missing, unreadable or not aligned.

        A side may be empty text; whoever reads leaves such a pair out.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """A hash that changes when the pairs (or what finds them) change; cheap to make."""

    def given(self) -> frozenset[SplitName]:
        """The splits that the corpus itself has; the others are cut from its training pairs."""
        return frozenset()


_KINDS: dict[str, type[PairSource]] = {}
_Kind = TypeVar("_Kind", bound=type[PairSource])


def register(kind: _Kind) -> _Kind:
    """Class decorator: make a kind known to `parse_pairs`."""
    if kind.kind in _KINDS:
        raise ValueError(f"two kinds of sentence pairs are called {kind.kind!r}")
    _KINDS[kind.kind] = kind
    return kind


def kinds() -> Mapping[str, type[PairSource]]:
    """Every registered kind, by name."""
    return dict(_KINDS)

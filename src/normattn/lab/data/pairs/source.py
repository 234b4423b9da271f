"""What sentence pairs are read from: a value that names them and can read them again."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from normattn.errors import InputError
from normattn.lab.data.sources import Registry, Source
from normattn.lab.data.splits import SplitName


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


class PairSource(Source):
    """Sentence pairs, streamed in a fixed order; `PairsConfig.corpus` is the address of some."""

    @classmethod
    @abstractmethod
    def parse(cls, body: str, options: Mapping[str, str], languages: Languages) -> PairSource:
        """Build the source of an address; `InputError` for an option it does not know."""

    @abstractmethod
    def pairs(self) -> Iterator[Pair]:
        """Yield every pair; raises `InputError` where they are missing, unreadable or not aligned.

        A side may be empty text; whoever reads leaves such a pair out.
        """

    def given(self) -> frozenset[SplitName]:
        """The splits that the corpus itself has; the others are cut from its training pairs."""
        return frozenset()


PAIRS = Registry[PairSource](
    "corpus of sentence pairs",
    "catalogues, a folder of train/val/test files by language, two aligned files as FILE,FILE, "
    "or a .jsonl file",
    refusal="holds no sentence pairs",
)


def parse_pairs(text: str, languages: Languages) -> PairSource:
    """The sentence pairs that an address names: `body` or `body?option=value&…`.

    `catalogues`, `FOLDER`, `FILE,FILE` (source language first) or `FILE.jsonl`; `.gz` of any of
    these. Raises `InputError` for anything else and for options that the kind does not know.
    """
    kind, body, options = PAIRS.find(text)
    return kind.parse(body, options, languages)

"""Two aligned files: `FILE,FILE`, the source language first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from normattn.files import expanded
from normattn.lab.data.pairs.lines import aligned_lines, stamp
from normattn.lab.data.pairs.source import PAIRS, Languages, Pair, PairSource
from normattn.lab.data.sources import take_options


@PAIRS.register
@dataclass(frozen=True)
class AlignedFiles(PairSource):
    """Line n of `source` and line n of `target` are a pair; splits are drawn by sentence.

    The files' names say nothing about their languages, so the order does: source, then target.
    """

    source: Path
    target: Path

    kind: ClassVar[str] = "aligned"
    summary: ClassVar[str] = "two files, line n of one the translation of line n of the other"

    @classmethod
    def claims(cls, body: str) -> bool:
        """Two names with a comma between, of which the first is a file."""
        first, comma, second = body.partition(",")
        return bool(comma and second) and expanded(first).is_file()

    @classmethod
    def parse(cls, body: str, options: Mapping[str, str], languages: Languages) -> AlignedFiles:
        """`FILE,FILE`; there are no options."""
        take_options(body, options, [])
        first, _, second = body.partition(",")
        return cls(expanded(first), expanded(second))

    def pairs(self) -> Iterator[Pair]:
        """Stream the lines."""
        return (Pair(*both) for both in aligned_lines(self.source, self.target))

    def fingerprint(self) -> str:
        """By name, size and time of the files."""
        return stamp((self.source, self.target))

"""Which sentence pairs an address names."""

from __future__ import annotations

from normattn.data.pairs.source import PAIRS, Languages, PairSource


def parse_pairs(text: str, languages: Languages) -> PairSource:
    """The sentence pairs that an address names: `body` or `body?option=value&…`.

    `catalogues`, `FOLDER`, `FILE,FILE` (source language first) or `FILE.jsonl`; `.gz` of any of
    these. Raises `InputError` for anything else and for options that the kind does not know.
    """
    kind, body, options = PAIRS.find(text)
    return kind.parse(body, options, languages)

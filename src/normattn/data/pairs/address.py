"""Which sentence pairs an address names."""

from __future__ import annotations

from urllib.parse import parse_qsl

from normattn.data.pairs.source import Languages, PairSource, kinds
from normattn.errors import InputError
from normattn.files import expanded

EXPECTED = (
    "catalogues, a folder of train/val/test files by language, two aligned files as "
    "FILE,FILE, or a .jsonl file"
)


def parse_pairs(text: str, languages: Languages) -> PairSource:
    """The sentence pairs that an address names: `body` or `body?option=value&…`.

    `catalogues`, `FOLDER`, `FILE,FILE` (source language first) or `FILE.jsonl`; `.gz` of any of
    these. Raises `InputError` for anything else and for options that the kind does not know.
    """
    body, mark, query = text.partition("?")
    if not text.strip():
        raise InputError(f"the corpus of sentence pairs has no name: expected {EXPECTED}")
    options: dict[str, str] = {}
    if mark and not expanded(text).exists():
        try:
            pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True)
        except ValueError as error:
            raise InputError(
                f"corpus {text!r}: expected ?option=value&… behind the name"
            ) from error
        options = dict(pairs)
    else:
        body = text
    for kind in kinds().values():
        if kind.claims(body):
            return kind.parse(body, options, languages)
    raise InputError(f"corpus {body!r} holds no sentence pairs: expected {EXPECTED}")

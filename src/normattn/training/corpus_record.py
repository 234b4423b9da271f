"""What a run on text leaves beside its model: the tokeniser, and what the text was taken from."""

from __future__ import annotations

from pathlib import Path

from normattn.atomic import write_json
from normattn.data import TokenData

CORPUS_FILE = "corpus.json"
TOKENISER_FILE = "tokeniser.json"


def leave_corpus(data: TokenData, out: Path) -> None:
    """Write the tokeniser, if there is one, and `corpus.json`.

    That holds the `fingerprint` of the tokens and the `sources` of the text with their versions.
    """
    if data.tokeniser is not None:
        data.tokeniser.save(out / TOKENISER_FILE)
    record = {"fingerprint": data.fingerprint, "sources": dict(data.sources)}
    write_json(out / CORPUS_FILE, record)

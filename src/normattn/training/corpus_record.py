"""What a run on text leaves beside its model: the tokeniser, and what the text was taken from."""

from __future__ import annotations

from pathlib import Path

from normattn.atomic import write_json
from normattn.data import TokenData
from normattn.errors import InputError
from normattn.structured import read_object

CORPUS_FILE = "corpus.json"
TOKENISER_FILE = "tokeniser.json"


def begin_corpus(data: object, out: Path) -> None:
    """Note at the start of a run on tokens what it reads, or refuse to go on with another text.

    Files behind a corpus can change while a run is stopped: it would go on with the ids of another
    tokeniser. Raises `InputError`.
    """
    if not isinstance(data, TokenData):
        return
    record = out / CORPUS_FILE
    if record.is_file() and read_object(record).get("fingerprint") != data.fingerprint:
        raise InputError(
            f"{out} was begun on another text: {record} has another fingerprint than the corpus as "
            "it is now; restore the corpus, or train in a new directory"
        )
    leave_corpus(data, out)


def leave_corpus(data: TokenData, out: Path) -> None:
    """Write the tokeniser, if there is one, and `corpus.json`.

    That holds the `fingerprint` of the tokens and the `sources` of the text with their versions.
    """
    if data.tokeniser is not None:
        data.tokeniser.save(out / TOKENISER_FILE)
    record = {"fingerprint": data.fingerprint, "sources": dict(data.sources)}
    write_json(out / CORPUS_FILE, record)

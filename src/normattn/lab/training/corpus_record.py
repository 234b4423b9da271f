"""What a run leaves of its data beside its model: which it was, and the tokeniser of a text."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from normattn.errors import InputError
from normattn.io import read_object, write_json
from normattn.lab.data import TokenData

CORPUS_FILE = "corpus.json"
TOKENISER_FILE = "tokeniser.json"


@runtime_checkable
class HasFingerprint(Protocol):
    """Prepared data."""

    @property
    def fingerprint(self) -> str:
        """A hash of all of it."""


def begin_corpus(data: object, out: Path) -> None:
    """Write `corpus.json` at the start of a run, or refuse to go on with other data than it says.

    It holds the `fingerprint` of the data and, of tokens, the `sources` of the text with their
    versions. Files behind a corpus can change while a run is stopped: it would go on with the ids
    of another tokeniser. Raises `InputError`.
    """
    if not isinstance(data, HasFingerprint):
        return
    refuse_other_data(data, out, "begun")
    sources = dict(data.sources) if isinstance(data, TokenData) else {}
    write_json(out / CORPUS_FILE, {"fingerprint": data.fingerprint, "sources": sources})


def refuse_other_data(data: HasFingerprint, run: Path, was: str = "trained") -> None:
    """`InputError` where the run in `run` was trained on other data than `data`.

    Its model would read the ids of another tokeniser, and documents that it has seen. A run from
    before there was a `corpus.json` says nothing, and passes.
    """
    record = run / CORPUS_FILE
    if record.is_file() and read_object(record).get("fingerprint") != data.fingerprint:
        raise InputError(
            f"{run} was {was} on other data: {record} has another fingerprint than the corpus as "
            "it is now; restore the corpus, or train in a new directory"
        )


def leave_tokeniser(data: TokenData, out: Path) -> None:
    """Write the tokeniser, if there is one."""
    if data.tokeniser is not None:
        data.tokeniser.save(out / TOKENISER_FILE)

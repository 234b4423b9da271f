"""A Hugging Face dataset by name, streamed: nothing but the rows in hand is kept."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from normattn.errors import InputError, library
from normattn.lab.data.corpora.budget import capped
from normattn.lab.data.corpora.corpus import CORPORA, Corpus, Document
from normattn.lab.data.sources import address, take_options

_PREFIX = "hf:"


@CORPORA.register
@dataclass(frozen=True)
class HubCorpus(Corpus):
    """`hf:NAME[?config=..&split=train&field=text&revision=..]`; a row is a document.

    Needs the `datasets` library (extra `data`) and a network. Pin a `revision` to be sure that
    the text stays the same: the fingerprint is the address, not the text.
    """

    name: str
    config: str | None = None
    split: str | None = None
    field: str | None = None
    revision: str | None = None

    kind: ClassVar[str] = "hf"
    summary: ClassVar[str] = "hf:NAME[?config=&split=train&field=text&revision=], from the hub"

    @classmethod
    def claims(cls, body: str) -> bool:
        """Every address that starts with `hf:`."""
        return body.startswith(_PREFIX)

    @classmethod
    def parse(cls, body: str, options: Mapping[str, str]) -> HubCorpus:
        """Split the address into name and options."""
        name = body.removeprefix(_PREFIX)
        if not name:
            raise InputError("corpus 'hf:' names no dataset: expected hf:NAME, such as hf:me/data")
        return cls(name, **take_options(body, options, ["config", "split", "field", "revision"]))

    def documents(self, limit: int | None = None) -> Iterator[Document]:
        """Stream the rows; names are the row numbers."""
        return capped(self._rows(), limit)

    def fingerprint(self) -> str:
        """Hash of the address."""
        return hashlib.sha256(str(self).encode()).hexdigest()

    def total_bytes(self) -> int | None:
        """Not known."""
        return None

    def __str__(self) -> str:
        return address(
            _PREFIX + self.name,
            config=self.config,
            split=self.split,
            field=self.field,
            revision=self.revision,
        )

    def _rows(self) -> Iterator[Document]:
        lacking = f"corpus {str(self)!r} needs the datasets library: pip install 'normattn[data]'"
        load = library("datasets", lacking).load_dataset
        field = self.field or "text"
        named = {"split": self.split or "train", "revision": self.revision}
        try:
            rows = load(self.name, self.config, **named, streaming=True)
            for number, row in enumerate(rows):
                yield Document(f"{number:09}", self._text(row, number, field))
        except InputError:
            raise
        except Exception as error:  # whatever the hub's client raises, the user gets a sentence
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> InputError:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return InputError(
            f"corpus {str(self)!r} cannot be read from the hub: {reason}; check its name, config "
            "and split and the network, or give a local file"
        )

    def _text(self, row: Mapping[str, Any], number: int, field: str) -> str:
        if field not in row:
            fields = ", ".join(map(repr, row))
            raise InputError(
                f"corpus {str(self)!r} has no field {field!r} (its fields: {fields}); "
                "choose with ?field="
            )
        text = row[field]
        if not isinstance(text, str):
            kind = type(text).__name__
            raise InputError(
                f"corpus {str(self)!r}, row {number}: field {field!r} is not text but a {kind}"
            )
        return text

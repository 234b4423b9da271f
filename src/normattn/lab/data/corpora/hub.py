"""A Hugging Face dataset by name, streamed: nothing but the rows in hand is kept."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from normattn.errors import InputError, library, need
from normattn.lab.data.corpora.budget import capped
from normattn.lab.data.corpora.corpus import CORPORA, Corpus, Document
from normattn.lab.data.sources import address, take_options

_PREFIX = "hf:"
_COMMIT = re.compile(r"[0-9a-f]{40}")


@CORPORA.register
@dataclass(frozen=True)
class HubCorpus(Corpus):
    """`hf:NAME[?config=..&split=train&field=text&revision=..]`; a row is a document.

    Needs the `datasets` library (extra `data`) and a network. The text is that of one commit: of
    `revision` where that is a commit, else of the newest one of that branch (default: the main
    one). The commit is part of the fingerprint and of the sources, so a dataset that changed on
    the hub is another text, never an old one from the cache.
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
        """Hash of the address and of the commit, which is looked up on the hub."""
        return hashlib.sha256(f"{self} {self._commit()}".encode()).hexdigest()

    def sources(self) -> dict[str, str]:
        """The commit of the dataset."""
        return {_PREFIX + self.name: self._commit()}

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

    def notes(self) -> tuple[str, ...]:
        """The rows come over the network; `InputError` where datasets is not installed."""
        need("datasets", self._lacking)
        return (f"the corpus {self} is read from the hub, over the network",)

    def _commit(self) -> str:
        if self.revision is not None and _COMMIT.fullmatch(self.revision):
            return self.revision
        hub = library("huggingface_hub", self._lacking)
        try:
            return _newest_commit(hub, self.name, self.revision)
        except Exception as error:  # whatever the hub's client raises, the user gets a sentence
            raise self._failed(error, "; ?revision=COMMIT needs no look at the hub") from error

    @property
    def _lacking(self) -> str:
        return f"corpus {str(self)!r} needs the datasets library: pip install 'normattn[data]'"

    def _rows(self) -> Iterator[Document]:
        load = library("datasets", self._lacking).load_dataset
        field = self.field or "text"
        named = {"split": self.split or "train", "revision": self._commit()}
        try:
            rows = load(self.name, self.config, **named, streaming=True)
            for number, row in enumerate(rows):
                yield Document(f"{number:09}", self._text(row, number, field))
        except InputError:
            raise
        except Exception as error:  # whatever the hub's client raises, the user gets a sentence
            raise self._failed(error) from error

    def _failed(self, error: Exception, more: str = "") -> InputError:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return InputError(
            f"corpus {str(self)!r} cannot be read from the hub: {reason}; check its name, config "
            f"and split and the network, or give a local file{more}"
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


@cache
def _newest_commit(hub: Any, name: str, revision: str | None) -> str:
    """The commit of a branch or tag; asked for once, so that one process reads one text."""
    return str(hub.HfApi().dataset_info(name, revision=revision).sha)

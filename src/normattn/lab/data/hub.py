"""Data sets of the Hugging Face hub: one commit of one, its rows streamed as documents."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from normattn.errors import InputError, library, need
from normattn.lab.data.sources import SPLITS, Address, Corpus, Document, Reader, SplitName, capped

PREFIX = "hf:"
OPTIONS = ("config", "split", "revision")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubCorpus(Corpus):
    """`hf:NAME[?config=…&split=…&revision=…]`: the rows of a data set, a document each.

    It is of one commit: that of `revision`, else the newest of that branch or of main. The commit
    is part of the fingerprint and of the sources, so a data set that changed on the hub is never
    an old one from the cache. Rows are those of `split` (default train), and with `held_out` also
    those of its own validation and test splits where the address names no split. Needs the
    `datasets` library (extra `data`).
    """

    address: Address
    read: Reader
    held_out: bool = False

    def __post_init__(self) -> None:
        if not self._name:
            raise InputError("corpus 'hf:' names no dataset: expected hf:NAME, such as hf:me/data")

    def documents(self, limit: int | None = None) -> Iterator[Document]:
        """Stream the rows."""
        return capped(self._rows(), limit)

    def _rows(self) -> Iterator[Document]:
        load = library("datasets", self._lacking).load_dataset
        given: dict[str, SplitName] = {split: split for split in self.given()}
        for split in (self.address.options.get("split", "train"), *given):
            options = {"split": split, "revision": self.commit(), "streaming": True}
            start, held_out = f"{split}:" if split in given else "", given.get(split)
            with self._reading():
                rows = load(self._name, self.address.options.get("config"), **options)
                for number, row in enumerate(rows):
                    where = f"corpus '{self.address}', {split} row {number}"
                    document = self.read(f"{start}{number:09}", row, where)
                    yield replace(document, split=held_out) if held_out else document

    def given(self) -> tuple[SplitName, ...]:
        """The held-out splits that the data set has, where the address names none itself."""
        if not self.held_out or "split" in self.address.options:
            return ()
        names = library("datasets", self._lacking).get_dataset_split_names
        config = self.address.options.get("config")
        with self._reading():
            there = names(self._name, config, revision=self.commit())
        return tuple(name for name in SPLITS[1:] if name in there)

    def commit(self) -> str:
        """The commit, which is looked up on the hub where `revision` is none."""
        revision = self.address.options.get("revision")
        if revision is not None and _COMMIT.fullmatch(revision):
            return revision
        hub = library("huggingface_hub", self._lacking)
        with self._reading("; ?revision=COMMIT needs no look at the hub"):
            return _newest_commit(hub, self._name, revision)

    def fingerprint(self) -> str:
        """Hash of the address and of the commit."""
        return hashlib.sha256(f"{self.address} {self.commit()}".encode()).hexdigest()

    def sources(self) -> dict[str, str]:
        """The commit of the data set."""
        return {self.address.body: self.commit()}

    def notes(self) -> tuple[str, ...]:
        """The rows come over the network; `InputError` where datasets is not installed."""
        need("datasets", self._lacking)
        return (f"the corpus {self.address} is read from the hub, over the network",)

    @property
    def _name(self) -> str:
        return self.address.body.removeprefix(PREFIX)

    @property
    def _lacking(self) -> str:
        return f"corpus '{self.address}' needs the datasets library: pip install 'normattn[data]'"

    @contextmanager
    def _reading(self, advice: str = "") -> Iterator[None]:
        """Turn whatever the hub's client raises into one sentence."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InputError(
                f"corpus '{self.address}' cannot be read from the hub: {reason}; check its name, "
                f"config and split and the network, or give a local file{advice}"
            ) from error


@cache
def _newest_commit(hub: Any, name: str, revision: str | None) -> str:
    """The commit of a branch or tag; asked for once, so that one process reads one text."""
    return str(hub.HfApi().dataset_info(name, revision=revision).sha)

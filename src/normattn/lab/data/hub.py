"""Data sets of the Hugging Face hub as rows: `hf:NAME[?config=…&split=…&revision=…]`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from normattn.errors import InputError, library, need
from normattn.lab.data.sources import Address
from normattn.lab.data.splits import SPLITS, SplitName

PREFIX = "hf:"
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubRows:
    """A data set of one commit: that of `revision`, else the newest of that branch or of main.

    Needs the `datasets` library (extra `data`) and a network. The commit is part of the fingerprint
    and of the sources, so a data set that changed on the hub is never an old one from the cache.
    """

    address: Address
    name: str
    config: str | None = None
    split: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, address: Address, *more: str) -> HubRows:
        """Read an address that starts with `hf:`; `more` are options that the caller reads."""
        name = address.body.removeprefix(PREFIX)
        if not name:
            raise InputError("corpus 'hf:' names no dataset: expected hf:NAME, such as hf:me/data")
        options = address.take("config", "split", *more, "revision")
        return cls(address, name, options["config"], options["split"], options["revision"])

    def rows(self, split: str = "train") -> Iterator[dict[str, Any]]:
        """Stream the rows of the address's split, else of `split`."""
        load = library("datasets", self._lacking).load_dataset
        split = self.split or split
        try:
            options = {"split": split, "revision": self.commit(), "streaming": True}
            yield from load(self.name, self.config, **options)
        except InputError:
            raise
        except Exception as error:  # whatever the hub's client raises, the user gets a sentence
            raise self._failed(error) from error

    def splits(self) -> list[SplitName]:
        """The held-out splits that the data set has, where the address names none itself."""
        if self.split is not None:
            return []
        names = library("datasets", self._lacking).get_dataset_split_names
        try:
            there = names(self.name, self.config, revision=self.commit())
        except Exception as error:  # as above
            raise self._failed(error) from error
        return [name for name in SPLITS[1:] if name in there]

    def commit(self) -> str:
        """The commit, which is looked up on the hub where `revision` is none."""
        if self.revision is not None and _COMMIT.fullmatch(self.revision):
            return self.revision
        hub = library("huggingface_hub", self._lacking)
        try:
            return _newest_commit(hub, self.name, self.revision)
        except Exception as error:  # as above
            raise self._failed(error, "; ?revision=COMMIT needs no look at the hub") from error

    def fingerprint(self) -> str:
        """Hash of the address and of the commit."""
        return hashlib.sha256(f"{self.address} {self.commit()}".encode()).hexdigest()

    def notes(self) -> tuple[str, ...]:
        """The rows come over the network; `InputError` where datasets is not installed."""
        need("datasets", self._lacking)
        return (f"the corpus {self.address} is read from the hub, over the network",)

    @property
    def _lacking(self) -> str:
        return f"corpus '{self.address}' needs the datasets library: pip install 'normattn[data]'"

    def _failed(self, error: Exception, more: str = "") -> InputError:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return InputError(
            f"corpus '{self.address}' cannot be read from the hub: {reason}; check its name, "
            f"config and split and the network, or give a local file{more}"
        )


@cache
def _newest_commit(hub: Any, name: str, revision: str | None) -> str:
    """The commit of a branch or tag; asked for once, so that one process reads one text."""
    return str(hub.HfApi().dataset_info(name, revision=revision).sha)

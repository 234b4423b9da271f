"""Data sets of the Hugging Face hub: one commit of one, its rows streamed as documents."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from normattn.errors import InputError, import_library, require_module
from normattn.lab.data.sources import SPLITS, Address, Corpus, Document, Reader, SplitName, capped

PREFIX = "hf:"
OPTIONS = ("config", "split", "revision")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def hub_corpus(address: Address, read: Reader, held_out: bool = False) -> Corpus:
    """`hf:NAME[?config=…&split=…&revision=…]`: the rows of a data set, a document each.

    It is of one commit: that of `revision`, else the newest of that branch or of main. The commit
    is part of the fingerprint and of the sources, so a data set that changed on the hub is never
    an old one from the cache. Rows are those of `split` (default train), and with `held_out` also
    those of its own validation and test splits where the address names no split. Needs the
    `datasets` library (extra `data`).
    """
    name, options = address.body.removeprefix(PREFIX), address.options
    lacking = f"corpus '{address}' needs the datasets library: pip install 'normattn[data]'"
    if not name:
        raise InputError("corpus 'hf:' names no dataset: expected hf:NAME, such as hf:me/data")

    @contextmanager
    def reading(advice: str = "") -> Iterator[None]:
        """Turn whatever the hub's client raises into one sentence."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InputError(
                f"corpus '{address}' cannot be read from the hub: {reason}; check its name, "
                f"config and split and the network, or give a local file{advice}"
            ) from error

    def commit() -> str:
        revision = options.get("revision")
        if revision is not None and _COMMIT.fullmatch(revision):
            return revision
        hub = import_library("huggingface_hub", lacking)
        with reading("; ?revision=COMMIT needs no look at the hub"):
            return _newest_commit(hub, name, revision)

    def given() -> tuple[SplitName, ...]:
        if not held_out or "split" in options:
            return ()
        names = import_library("datasets", lacking).get_dataset_split_names
        with reading():
            there = names(name, options.get("config"), revision=commit())
        return tuple(split for split in SPLITS[1:] if split in there)

    def rows() -> Iterator[Document]:
        load = import_library("datasets", lacking).load_dataset
        own: dict[str, SplitName] = {split: split for split in given()}
        for split in (options.get("split", "train"), *own):
            start, place = f"{split}:" if split in own else "", own.get(split)
            with reading():
                settings = {"split": split, "revision": commit(), "streaming": True}
                for number, row in enumerate(load(name, options.get("config"), **settings)):
                    where = f"corpus '{address}', {split} row {number}"
                    document = read(f"{start}{number:09}", row, where)
                    yield replace(document, split=place) if place else document

    def notes() -> tuple[str, ...]:
        require_module("datasets", lacking)
        return (f"the corpus {address} is read from the hub, over the network",)

    return Corpus(
        lambda limit=None: capped(rows(), limit),
        lambda: hashlib.sha256(f"{address} {commit()}".encode()).hexdigest(),
        given,
        lambda: {address.body: commit()},
        notes,
    )


@cache
def _newest_commit(hub: Any, name: str, revision: str | None) -> str:
    """The commit of a branch or tag; asked for once, so that one process reads one text."""
    return str(hub.HfApi().dataset_info(name, revision=revision).sha)

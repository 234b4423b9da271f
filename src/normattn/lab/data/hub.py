"""Data sets of the Hugging Face hub: the rows of one commit, streamed as documents."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from normattn.errors import InputError, import_library, require_module
from normattn.lab.data.sources import (
    SPLITS,
    Address,
    Corpus,
    Document,
    RowReader,
    SplitName,
    limit_bytes,
)

PREFIX = "hf:"
OPTIONS = ("config", "split", "revision")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def hub_corpus(address: Address, read: RowReader, held_out: bool = False) -> Corpus:
    """Return the corpus `hf:NAME[?config=…&split=…&revision=…]`, one document for each row.

    It reads one commit: `revision`, or the newest commit of that branch or of main. The commit is
    part of the fingerprint and of the sources, so a data set that changed on the hub is never
    served from an old cache. Rows come from `split` (default train). With `held_out` and no split
    in the address, rows of the validation and test splits follow. Needs the `datasets` library
    (extra `data`).
    """
    name, options = address.body.removeprefix(PREFIX), address.options
    missing = f"corpus '{address}' needs the datasets library: pip install 'normattn[data]'"
    if not name:
        raise InputError("corpus 'hf:' names no dataset: expected hf:NAME, such as hf:me/data")

    @contextmanager
    def explain_hub_errors(advice: str = "") -> Iterator[None]:
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
        hub = import_library("huggingface_hub", missing)
        with explain_hub_errors("; ?revision=COMMIT needs no look at the hub"):
            return _newest_commit(hub, name, revision)

    def own_splits() -> tuple[SplitName, ...]:
        if not held_out or "split" in options:
            return ()
        split_names = import_library("datasets", missing).get_dataset_split_names
        with explain_hub_errors():
            available = split_names(name, options.get("config"), revision=commit())
        return tuple(split for split in SPLITS[1:] if split in available)

    def rows() -> Iterator[Document]:
        load = import_library("datasets", missing).load_dataset
        splits: list[tuple[str, SplitName | None]] = [(options.get("split", "train"), None)]
        splits += [(split, split) for split in own_splits()]
        for source, split in splits:
            prefix = f"{source}:" if split else ""
            with explain_hub_errors():
                settings = {"split": source, "revision": commit(), "streaming": True}
                for number, row in enumerate(load(name, options.get("config"), **settings)):
                    where = f"corpus '{address}', {source} row {number}"
                    document = read(f"{prefix}{number:09}", row, where)
                    yield replace(document, split=split) if split else document

    def notes() -> tuple[str, ...]:
        require_module("datasets", missing)
        return (f"the corpus {address} is read from the hub, over the network",)

    return Corpus(
        lambda limit=None: limit_bytes(rows(), limit),
        lambda: hashlib.sha256(f"{address} {commit()}".encode()).hexdigest(),
        own_splits,
        lambda: {address.body: commit()},
        notes,
    )


@cache
def _newest_commit(hub: Any, name: str, revision: str | None) -> str:
    """Return the commit of a branch or tag. Cached, so that one process reads one text."""
    return str(hub.HfApi().dataset_info(name, revision=revision).sha)

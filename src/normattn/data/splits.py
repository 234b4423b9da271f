"""Which split a document belongs to: a pure function of its name and a seed."""

from __future__ import annotations

import hashlib
from typing import Literal, get_args

SplitName = Literal["train", "validation", "test"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)


def split_of(name: str, seed: int, test: float, validation: float) -> SplitName:
    """The split of the document `name`: hashed to u in [0, 1), test first, then validation.

    Other documents do not matter, so a corpus that grows keeps its split, and a document is in
    the test split of every larger `test` fraction too.
    """
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    u = int.from_bytes(digest, "big") / 2**64
    if u < test:
        return "test"
    return "validation" if u < test + validation else "train"

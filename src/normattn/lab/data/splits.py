"""Which split a document belongs to: a pure function of its name and a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, get_args

from normattn.errors import InputError

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


def check_fractions(test: float, validation: float, rest: str) -> None:
    """Raise `ValueError` where the shares that are held out leave none of the `rest`."""
    if test + validation >= 1:
        raise ValueError(
            f"test_fraction and validation_fraction leave no {rest}: they add up to "
            f"{test + validation:g} and must stay below 1"
        )


S = TypeVar("S")


@dataclass(frozen=True)
class Splits(Generic[S]):
    """Data in three splits, one after another."""

    train: S
    validation: S
    test: S

    def __iter__(self) -> Iterator[S]:
        return iter((self.train, self.validation, self.test))

    def split(self, name: str) -> S:
        """The split called `name`; `InputError` for another name."""
        for known, split in zip(SPLITS, self, strict=True):
            if known == name:
                return split
        raise InputError(f"there is no split {name!r}: expected {', '.join(SPLITS)}")

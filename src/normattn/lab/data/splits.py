"""Which split an item belongs to, a pure function of its name and a seed; and its settings."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, get_args

from pydantic import Field, model_validator

from normattn.errors import InputError
from normattn.settings import Settings

SplitName = Literal["train", "validation", "test"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)
S = TypeVar("S")


class SplitSettings(Settings):
    """How data without splits of its own is split: the base of every configuration of data.

    - `test_fraction`, `validation_fraction`: shares of the items (default 0.1 and 0.05).
    - `seed`: decides which items these are (default 0).
    """

    test_fraction: float = Field(default=0.1, ge=0, lt=1)
    validation_fraction: float = Field(default=0.05, ge=0, lt=1)
    seed: int = Field(default=0, ge=0, lt=1 << 63)

    @model_validator(mode="after")
    def _leaves_training_data(self) -> SplitSettings:
        held_out = self.test_fraction + self.validation_fraction
        if held_out >= 1:
            raise ValueError(
                "test_fraction and validation_fraction leave nothing to train on: they add up to "
                f"{held_out:g} and must stay below 1"
            )
        return self

    def look(self) -> tuple[str, ...]:
        """What a plan says of the data before anything is done; quick, no data is prepared.

        Raises `InputError` where the data, or a library that reads it, is plainly not there.
        """
        return ()

    def split_of(self, name: str, given: Collection[SplitName] = ()) -> SplitName:
        """The split of the item with this name; nothing is cut off for splits that are `given`."""
        test = 0.0 if "test" in given else self.test_fraction
        validation = 0.0 if "validation" in given else self.validation_fraction
        return split_of(name, self.seed, test, validation)


def split_of(name: str, seed: int, test: float, validation: float) -> SplitName:
    """The split of the item `name`: hashed to u in [0, 1), test first, then validation.

    Other items do not matter, so a corpus that grows keeps its split, and an item is in the test
    split of every larger `test` fraction too.
    """
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    u = int.from_bytes(digest, "big") / 2**64
    if u < test:
        return "test"
    return "validation" if u < test + validation else "train"


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

"""The index of a folder of tokens: what its files hold, and how they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, ValidationError

from normattn.errors import InputError
from normattn.lab.data.shard_writer import UNDIVIDED, shard_paths
from normattn.lab.data.splits import SPLITS, SplitName
from normattn.lab.data.token_data import PackedNames, TokenSplit
from normattn.lab.data.token_shards import TokenShards
from normattn.structured import Settings, read_object

INDEX = "index.json"
_PLACES = np.dtype("<i8")
_LETTERS = np.dtype("u1")


class Column(NamedTuple):
    """A sequence of a split: its name in the folder, its type, and how many values it has.

    `shard_length` of them stand in each of its files.
    """

    name: str
    dtype: np.dtype[Any]
    length: int
    shard_length: int = UNDIVIDED

    def paths(self, folder: Path) -> list[Path]:
        """Its files, in order."""
        return shard_paths(folder, self.name, self.length, self.shard_length)


class SplitCounts(Settings):
    """How much a split holds: documents, tokens (with separators), bytes of text and of names."""

    documents: int = Field(default=0, ge=0)
    tokens: int = Field(default=0, ge=0)
    text_bytes: int = Field(default=0, ge=0)
    name_bytes: int = Field(default=0, ge=0)


class TokenIndex(Settings):
    """What the files of a folder hold, or held when a shard was last full.

    `documents` of the corpus are in them, the last of which is called `last`. `tokeniser` is the
    fingerprint of what made them tokens, `fingerprint` that of all of them: empty until the end.
    """

    tokeniser: str
    dtype: Literal["<u2", "<u4"]
    shard_length: int = Field(ge=1)
    documents: int = Field(default=0, ge=0)
    last: str = ""
    splits: dict[SplitName, SplitCounts] = Field(
        default_factory=lambda: {name: SplitCounts() for name in SPLITS}
    )
    fingerprint: str = ""

    @classmethod
    def read(cls, folder: Path) -> TokenIndex:
        """The index of a folder; `InputError` when it is missing or damaged."""
        path = folder / INDEX
        try:
            return cls.model_validate(read_object(path))
        except ValidationError as error:
            raise InputError(f"{path} is damaged: it is no index of tokens") from error

    def columns(self, name: SplitName) -> tuple[Column, Column, Column, Column]:
        """The sequences of a split.

        Its tokens; where its documents begin in them, and the last one ends; the documents' names
        in UTF-8, one behind the other; where each name ends.
        """
        counts = self.splits[name]
        return (
            Column(f"{name}.tokens", np.dtype(self.dtype), counts.tokens, self.shard_length),
            Column(f"{name}.offsets", _PLACES, counts.documents + 1),
            Column(f"{name}.names", _LETTERS, counts.name_bytes),
            Column(f"{name}.name_ends", _PLACES, counts.documents),
        )

    def split(self, folder: Path, name: SplitName) -> TokenSplit:
        """One split of a complete folder; what is asked for is read then."""
        tokens, offsets, names, name_ends = (
            TokenShards(column.paths(folder), column.dtype, column.length, column.shard_length)
            for column in self.columns(name)
        )
        packed = PackedNames(names, name_ends)
        return TokenSplit(name, tokens, offsets, packed, self.splits[name].text_bytes)

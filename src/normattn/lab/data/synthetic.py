"""Generated tokens: a random segment repeated, the purest test of copying from the context."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from normattn.errors import InputError
from normattn.lab.data.sources import Address
from normattn.lab.data.splits import SplitName
from normattn.lab.data.token_data import TokenData, TokenSplit

_NAME = "synthetic:copy"


@dataclass(frozen=True)
class CopyTask:
    """`synthetic:copy[?low=8&high=32&tokens=1048576&documents=256&document_tokens=4097]`.

    The training split is one document of `tokens` independent uniform tokens: tiled throughout
    (`DataConfig.tiling`), every row is a fresh random segment of `low` … `high` tokens repeated.
    Validation and test hold `documents` documents each, one such sequence of `document_tokens`
    tokens in each. Token 0, the separator, is never drawn.
    """

    low: int = 8
    high: int = 32
    tokens: int = 1 << 20
    documents: int = 256
    document_tokens: int = 4097

    @staticmethod
    def claims(text: str) -> bool:
        """Whether an address names generated tokens."""
        return text.startswith("synthetic:")

    @classmethod
    def parse(cls, text: str) -> CopyTask:
        """Read the address; `InputError` for another task, an unknown option or no number."""
        address = Address.parse(text)
        if address.body != _NAME:
            raise InputError(f"corpus {text!r} is unknown: the generated corpus is {_NAME!r}")
        address.take(*(field.name for field in fields(cls)))
        for name, value in address.options.items():
            if not (value.isascii() and value.isdigit() and 0 < len(value) < 10 and int(value)):
                raise InputError(
                    f"corpus {text!r}: {name} is {value!r}; expected a whole number from 1 on"
                )
        task = cls(**{name: int(value) for name, value in address.options.items()})
        if task.low > task.high:
            raise InputError(f"corpus {text!r}: expected low ≤ high")
        return task

    def token_data(self, vocab_size: int, seed: int) -> TokenData:
        """Generate the three splits: a pure function of the task, `vocab_size` and `seed`."""
        generator = np.random.default_rng([seed, vocab_size])
        dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
        noise = generator.integers(1, vocab_size, self.tokens + 1).astype(dtype)
        noise[-1] = 0
        ends = np.array([0, len(noise)], dtype=np.int64)
        train = TokenSplit("train", noise, ends, ["train"])
        validation = self._tiled("validation", generator, vocab_size, dtype)
        test = self._tiled("test", generator, vocab_size, dtype)
        digest = hashlib.sha256()
        for split in (train, validation, test):
            digest.update(np.asarray(split.tokens, "<u4").tobytes())
        return TokenData(train, validation, test, None, vocab_size, digest.hexdigest())

    def _tiled(
        self, name: SplitName, generator: np.random.Generator, vocab_size: int, dtype: Any
    ) -> TokenSplit:
        """Documents that repeat a segment each."""
        count, length = self.documents, self.document_tokens
        period = generator.integers(self.low, self.high + 1, count)
        segments = generator.integers(1, vocab_size, (count, self.high))
        rows: np.ndarray = np.zeros((count, length + 1), dtype=dtype)
        column = np.arange(length) % period[:, None]
        rows[:, :-1] = np.take_along_axis(segments, column, axis=1)
        offsets = np.arange(count + 1, dtype=np.int64) * (length + 1)
        return TokenSplit(name, rows.reshape(-1), offsets, [f"{name}-{i:05}" for i in range(count)])

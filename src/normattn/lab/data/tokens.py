"""Tokens of a corpus: encoded in bounded memory, cached in files, split by document."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np
import tokenizers
from jaxtyping import Int64, UInt16, UInt32
from pydantic import Field, ValidationError, model_validator

from normattn import io
from normattn.errors import InputError
from normattn.lab.data import store
from normattn.lab.data.corpora import parse_corpus
from normattn.lab.data.sources import (
    SPLITS,
    Corpus,
    Document,
    SplitName,
    Splits,
    SplitSettings,
    parse_address,
)
from normattn.lab.data.tokeniser import SAMPLE_BYTES, SEPARATOR_ID, Tokeniser, train_tokeniser
from normattn.settings import Settings, explain

FORMAT = 4
"""Increased when the same settings would give other files, so that old caches are not used."""
_TOKENISER = "tokeniser.json"
GENERATED = "synthetic:"
COPY = f"{GENERATED}copy"
_TILING = ("tiled_fraction", "tiled_low", "tiled_high")
TEXT_ONLY = (*_TILING, "max_bytes", "test_fraction", "validation_fraction")
"""Settings that have no meaning for generated tokens."""
Count = Annotated[int, Field(ge=1, lt=10**9)]

Tokens = UInt16[np.ndarray, "tokens"] | UInt32[np.ndarray, "tokens"]
_COUNT_CHUNK = 1 << 21


@dataclass(frozen=True)
class TokenSplit:
    """The tokens of one split: concatenated documents, each followed by a separator (id 0).

    `tokens` (total,) is uint16 or uint32, in memory or mapped from a file. Document i, with its
    separator, is `tokens[offsets[i] : offsets[i + 1]]`; its name is `names[i]`.
    """

    name: SplitName
    tokens: np.ndarray
    offsets: np.ndarray
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def total(self) -> int:
        """Number of tokens, separators included."""
        return len(self.tokens)

    @cached_property
    def lengths(self) -> Int64[np.ndarray, "documents"]:
        """Number of tokens of every document, without its separator."""
        return np.diff(self.offsets) - 1

    def document(self, index: int) -> Tokens:
        """Return the tokens of one document, without its separator."""
        if not 0 <= index < len(self):
            raise IndexError(f"the {self.name} split has {len(self)} documents, no {index}")
        start, stop = self.offsets[index : index + 2].tolist()
        return self.tokens[start : stop - 1]

    def window(self, document: int, first: int, length: int) -> Tokens:
        """Return `length` tokens of a document, starting at its token `first`."""
        start = int(self.offsets[document]) + first
        return self.tokens[start : start + length]

    def token_counts(self, vocab_size: int) -> Int64[np.ndarray, "vocab"]:
        """Count how often each token occurs, separators included."""
        counts: np.ndarray = np.zeros(vocab_size, np.int64)
        for start in range(0, self.total, _COUNT_CHUNK):
            chunk = self.tokens[start : start + _COUNT_CHUNK]
            counts += np.bincount(chunk, minlength=vocab_size)
        return counts


@dataclass(frozen=True)
class TokenData(Splits[TokenSplit]):
    """A tokenised corpus: three splits that share no document.

    `vocab_size` is the configured size, which a model needs. The tokeniser (None for generated
    tokens) may have fewer entries if the text is small. `fingerprint` is a hash of the tokens,
    equal on every machine with the same text. `sources` maps each source of the text to its
    version, if the corpus has versions.
    """

    tokeniser: Tokeniser | None
    vocab_size: int
    fingerprint: str
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Tiling:
    """A `fraction` of the rows repeats a random segment of `low` … `high` tokens."""

    fraction: float
    low: int
    high: int


class DataConfig(SplitSettings):
    """The text, its tokeniser, its splits, and how much of it is tiled (repeated segments).

    - `corpus`: "python-source" (default), "python-packages-2026", a path, "hf:NAME" or
      "synthetic:copy", which uses `vocab_size` and `seed` alone.
    - `vocab_size`: entries of the byte-level BPE, separator included; at least 257 for text.
    - `test_fraction`, `validation_fraction`, `seed`: the split of the documents. The seed also
      decides the tokens of a synthetic corpus.
    - `tiled_fraction`: share of the training sequences that repeat a random segment of
      `tiled_low` … `tiled_high` tokens to the full length (default 0, 8, 32).
    - `max_bytes`: read at most this much text (default: all).
    """

    corpus: str = "python-source"
    vocab_size: int = Field(default=1024, ge=2, le=1 << 20)
    tiled_fraction: float = Field(default=0.0, ge=0, le=1)
    tiled_low: int = Field(default=8, ge=1)
    tiled_high: int = Field(default=32, ge=1)
    max_bytes: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        if self.tiled_low > self.tiled_high:
            raise ValueError(
                f"tiled_low ({self.tiled_low}) must not exceed tiled_high ({self.tiled_high})"
            )
        if self.synthetic:
            self.refuse_changed(self.corpus, *TEXT_ONLY)
        elif self.vocab_size < 257:
            raise ValueError(f"vocab_size must be at least 257 for text, not {self.vocab_size}")
        return self

    @property
    def synthetic(self) -> bool:
        """Whether the tokens are generated, not read from text."""
        return self.corpus.startswith(GENERATED)

    def open_corpus(self) -> Corpus | None:
        """Return the corpus; None for generated tokens."""
        if not self.synthetic:
            return parse_corpus(self.corpus)
        CopyTask.from_address(self.corpus)
        return None

    @property
    def tiling(self) -> Tiling | None:
        """The tiling for `TrainingBatches`. A synthetic corpus is tiled throughout."""
        if self.synthetic:
            task = CopyTask.from_address(self.corpus)
            return Tiling(1.0, task.low, task.high)
        tiling = Tiling(self.tiled_fraction, self.tiled_low, self.tiled_high)
        return tiling if tiling.fraction else None


def prepare_tokens(config: DataConfig, cache_dir: Path | None = None) -> TokenData:
    """Return the tokens of a corpus, from the cache or newly encoded into it.

    The tokeniser is trained on training documents only. An interrupted call is resumed by the next.
    `cache_dir` is as in `store.cached_folder`. Raises `InputError` if the corpus is missing, empty,
    unreadable or not UTF-8, or if the cache cannot be written.
    """
    if config.synthetic:
        return CopyTask.from_address(config.corpus).token_data(config.vocab_size, config.seed)
    corpus = parse_corpus(config.corpus)
    key = [
        *(FORMAT, tokenizers.__version__, SAMPLE_BYTES, corpus.fingerprint()),
        *(config.max_bytes, config.vocab_size),
        *(config.seed, config.test_fraction, config.validation_fraction),
    ]
    dtype = "<u2" if config.vocab_size <= 1 << 16 else "<u4"
    folder = store.cached_folder("tokens", key, partial(_build, config, corpus, dtype), cache_dir)
    splits = {}
    for name in SPLITS:
        tokens = store.Ragged.load(folder, f"{name}.tokens", dtype)
        names = store.Strings.load(folder, f"{name}.names", "u1")
        splits[name] = TokenSplit(name, tokens.values, tokens.offsets, names)
    return TokenData(
        **splits,
        tokeniser=Tokeniser.load(folder / _TOKENISER),
        vocab_size=config.vocab_size,
        fingerprint=io.read_object(folder / store.ABOUT)["fingerprint"],
        # The folder's key contains the corpus' fingerprint, so it has these versions.
        sources=corpus.sources(),
    )


def _build(config: DataConfig, corpus: Corpus, dtype: str, folder: Path) -> None:
    def documents() -> Iterator[Document]:
        return (document for document in corpus.documents(config.max_bytes) if document.text)

    def encode(batch: list[Document], counts: Counter[str]) -> Iterator[store.Row]:
        encoded = tokeniser.encode_batch([document.text for document in batch])
        for document, ids in zip(batch, encoded, strict=True):
            tokens = np.append(ids, np.uint32(SEPARATOR_ID))
            row = {"tokens": tokens, "names": store.utf8(document.name)}
            yield config.split_of(document.split_key), row

    if not (folder / _TOKENISER).exists():
        training = (d.text for d in documents() if config.split_of(d.split_key) == "train")
        train_tokeniser(training, config.vocab_size).save(folder / _TOKENISER)
    tokeniser = Tokeniser.load(folder / _TOKENISER)
    columns = {"tokens": dtype, "names": "u1"}
    store.write_splits(folder, config.corpus, columns, documents(), encode, required=SPLITS[:1])
    digests = [io.sha256_of(folder / _TOKENISER)]
    for name, column in product(SPLITS, columns):
        digests += store.column_digests(folder, f"{name}.{column}")
    fingerprint = hashlib.sha256("".join(digests).encode()).hexdigest()
    io.write_json(folder / store.ABOUT, {"fingerprint": fingerprint})


class CopyTask(Settings):
    """Repeated random segments: a pure test of copying from the context.

    Address: `synthetic:copy[?low=8&high=32&tokens=1048576&documents=256&document_tokens=4097]`.

    The training split is one document of `tokens` independent uniform tokens. With the tiling of
    `DataConfig.tiling` every training row repeats a new random segment of `low` … `high` tokens.
    Validation and test have `documents` documents each, one such row of `document_tokens` tokens
    in each. Token 0, the separator, is never drawn.
    """

    low: Count = 8
    high: Count = 32
    tokens: Count = 1 << 20
    documents: Count = 256
    document_tokens: Count = 4097

    @classmethod
    def from_address(cls, text: str) -> CopyTask:
        """Parse the address; `InputError` for another task or a bad option."""
        body, options = parse_address(text)
        if body != COPY:
            raise InputError(f"corpus {text!r} is unknown: the generated corpus is {COPY!r}")
        try:
            task = cls.model_validate(options)
        except ValidationError as error:
            raise InputError(f"corpus {text!r}: {explain(error)}") from error
        if task.low > task.high:
            raise InputError(f"corpus {text!r}: expected low ≤ high")
        return task

    def token_data(self, vocab_size: int, seed: int) -> TokenData:
        """Generate the three splits, a pure function of the task, `vocab_size` and `seed`."""
        generator = np.random.default_rng([seed, vocab_size])
        dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
        tokens = generator.integers(1, vocab_size, self.tokens + 1).astype(dtype)
        tokens[-1] = SEPARATOR_ID
        splits = [TokenSplit("train", tokens, np.array([0, len(tokens)], np.int64), ["train"])]
        count, length = self.documents, self.document_tokens
        for name in SPLITS[1:]:  # Documents that each repeat one segment.
            periods = generator.integers(self.low, self.high + 1, count)
            segments = generator.integers(1, vocab_size, (count, self.high))
            rows: np.ndarray = np.zeros((count, length + 1), dtype=dtype)
            columns = np.arange(length) % periods[:, None]
            rows[:, :-1] = np.take_along_axis(segments, columns, axis=1)
            offsets = np.arange(count + 1, dtype=np.int64) * (length + 1)
            names = [f"{name}-{i:05}" for i in range(count)]
            splits.append(TokenSplit(name, rows.reshape(-1), offsets, names))
        digest = hashlib.sha256()
        for split in splits:
            digest.update(split.tokens.astype("<u4").tobytes())
        train, validation, test = splits
        return TokenData(train, validation, test, None, vocab_size, digest.hexdigest())

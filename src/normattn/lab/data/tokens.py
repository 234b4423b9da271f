"""From a corpus to tokens in files: streamed once in bounded memory, cached, split by document."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tokenizers
from pydantic import Field, model_validator

from normattn import io
from normattn.io import read_object, sha256_of
from normattn.lab.data.batches import Tiling
from normattn.lab.data.corpora import Corpus, Document, parse_corpus
from normattn.lab.data.splits import SPLITS, SplitName, SplitSettings
from normattn.lab.data.store import (
    ABOUT,
    Names,
    Ragged,
    Row,
    column_digests,
    fill,
    prepared,
    refuse_empty,
    utf8,
)
from normattn.lab.data.synthetic import CopyTask
from normattn.lab.data.token_data import TokenData, TokenSplit
from normattn.lab.data.tokeniser import SAMPLE_BYTES, SEPARATOR_ID, Tokeniser, train_tokeniser

FORMAT = 4
"""Raised whenever the same settings would give other files: old caches are then left alone."""
_TOKENISER = "tokeniser.json"


class DataConfig(SplitSettings):
    """Which text, how it becomes tokens, how it is split, and how much of it is tiled.

    - `corpus`: "python-source" (default), "python-packages-2026", a path, "hf:NAME" or
      "synthetic:copy".
    - `vocab_size`: entries of the byte-level BPE, separator included; at least 257 for text.
    - `test_fraction`, `validation_fraction`, `seed`: the split of the documents; the seed also
      decides the tokens of a synthetic corpus.
    - `tiled_fraction`: share of the training sequences that are a random segment of
      `tiled_low` … `tiled_high` tokens repeated to the full length (default 0, 8, 32).
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
        if not self.synthetic and self.vocab_size < 257:
            raise ValueError(
                f"vocab_size must be at least 257 (256 bytes and a separator), got "
                f"{self.vocab_size}"
            )
        return self

    @property
    def synthetic(self) -> bool:
        """Whether the corpus is generated tokens instead of text."""
        return CopyTask.claims(self.corpus)

    def look(self) -> tuple[str, ...]:
        """What is fetched for the corpus; `InputError` where there is none, or no reader of it."""
        if self.synthetic:
            CopyTask.parse(self.corpus)
            return ()
        return parse_corpus(self.corpus).notes()

    @property
    def tiling(self) -> Tiling | None:
        """What `TrainingBatches` takes; a synthetic corpus is tiled throughout, by its periods."""
        if self.synthetic:
            task = CopyTask.parse(self.corpus)
            return Tiling(1.0, task.low, task.high)
        if self.tiled_fraction == 0:
            return None
        return Tiling(self.tiled_fraction, self.tiled_low, self.tiled_high)


def prepare_tokens(config: DataConfig, cache_dir: Path | None = None) -> TokenData:
    """The tokens of a corpus, from the cache or built into it.

    The tokeniser is trained on training documents only. Text streams through in batches of about
    256 kB; after an interruption the next call goes on where this one was. `cache_dir` as for
    `store.prepared`. Raises `InputError` for a corpus that is missing, empty, unreadable or not
    UTF-8, and for a cache that cannot be written.
    """
    if config.synthetic:
        return CopyTask.parse(config.corpus).token_data(config.vocab_size, config.seed)
    corpus = parse_corpus(config.corpus)
    decides = [
        *(FORMAT, tokenizers.__version__, SAMPLE_BYTES, type(corpus).__name__),
        *(corpus.fingerprint(), config.max_bytes, config.vocab_size),
        *(config.seed, config.test_fraction, config.validation_fraction),
    ]
    folder = prepared("tokens", decides, lambda folder: _build(folder, config, corpus), cache_dir)
    about = read_object(folder / ABOUT)
    return TokenData(
        **{name: _load(folder, name, config) for name in SPLITS},
        tokeniser=Tokeniser.load(folder / _TOKENISER),
        vocab_size=config.vocab_size,
        fingerprint=about["fingerprint"],
        # The folder's name holds the corpus' fingerprint: these are the versions it was made of.
        sources=corpus.sources(),
    )


def _dtype(config: DataConfig) -> str:
    return "<u2" if config.vocab_size <= 1 << 16 else "<u4"


def _load(folder: Path, name: SplitName, config: DataConfig) -> TokenSplit:
    tokens = Ragged.load(folder, f"{name}.tokens", _dtype(config))
    names = Names(Ragged.load(folder, f"{name}.names", "u1"))
    return TokenSplit(name, tokens.values, tokens.offsets, names)


def _build(folder: Path, config: DataConfig, corpus: Corpus) -> None:
    """Fill `folder` with the tokens of a corpus."""

    def documents() -> Iterator[Document]:
        return (document for document in corpus.documents(config.max_bytes) if document.text)

    def encode(batch: list[Document], counts: Counter[str]) -> Iterator[Row]:
        encoded = tokeniser.encode_arrays([document.text for document in batch])
        for document, ids in zip(batch, encoded, strict=True):
            ended = np.append(ids, np.uint32(SEPARATOR_ID))
            row = {"tokens": ended, "names": utf8(document.name)}
            yield config.split_of(document.split_name), row

    if not (folder / _TOKENISER).exists():
        training = (d.text for d in documents() if config.split_of(d.split_name) == "train")
        train_tokeniser(training, config.vocab_size).save(folder / _TOKENISER)
    tokeniser = Tokeniser.load(folder / _TOKENISER)
    columns = {"tokens": _dtype(config), "names": "u1"}
    counts = fill(folder, columns, documents(), encode)
    refuse_empty(folder, config.corpus, counts, needed=())
    digests = [sha256_of(folder / _TOKENISER)]
    for name in SPLITS:
        for column in columns:
            digests += column_digests(folder, f"{name}.{column}")
    fingerprint = hashlib.sha256("".join(digests).encode()).hexdigest()
    io.write_json(folder / ABOUT, {"fingerprint": fingerprint})

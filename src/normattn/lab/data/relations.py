"""Documents labelled by the relations they state: as word pieces, cached, in batches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
from jaxtyping import Bool, Float32, Int64
from pydantic import Field, model_validator

from normattn import io
from normattn.errors import InputError
from normattn.io import expanded, read_object, sha256_of
from normattn.lab.data import cache
from normattn.lab.data.batches import refuse_uneven_shares, uniforms
from normattn.lab.data.python_imports import imports_fingerprint, read_python_imports
from normattn.lab.data.relation_files import (
    RelationCorpus,
    folder_fingerprint,
    read_folder,
    split_files,
)
from normattn.lab.data.sources import split_address, take_options
from normattn.lab.data.splits import SPLITS, SplitName, Splits, check_fractions
from normattn.lab.data.word_pieces import WordPieces, train_word_pieces
from normattn.settings import Settings

FORMAT = 1
"""Raised whenever the same settings would give other files: old caches are then left alone."""
PYTHON_IMPORTS = "python-imports"
_POOL = 8
"""Batches whose documents are sorted by length among themselves."""
_ABOUT, _VOCABULARY = "about.json", "vocab.txt"


class RelationConfig(Settings):
    """Which documents, how they become word pieces, and how they are split.

    - `corpus`: "python-imports" (default: the standard library's own code, see
      `data.python_imports`), or a folder of train, dev and test files in the NYT24 form.
    - `vocabulary`: a WordPiece vocab.txt; None (default) learns one from the training split.
    - `vocab_size`: rows of the embedding (default 30,522, BERT's); a vocabulary may have fewer
      entries, not more.
    - `lower_case`: whether case and accents are dropped (default true).
    - `max_tokens`: a document is cut behind this many pieces (default 128).
    - python-imports alone: `modules`, the number of labels (default 24); `test_fraction` and
      `validation_fraction` of the files (default 0.15 each); `seed` of that split; `max_bytes`,
      the most text that is read (default: all).
    """

    corpus: str = PYTHON_IMPORTS
    vocabulary: str | None = None
    vocab_size: int = Field(default=30522, ge=3, le=1 << 20)
    lower_case: bool = True
    max_tokens: int = Field(default=128, ge=1, le=1 << 16)
    modules: int = Field(default=24, ge=1)
    test_fraction: float = Field(default=0.15, gt=0, lt=1)
    validation_fraction: float = Field(default=0.15, gt=0, lt=1)
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    max_bytes: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> RelationConfig:
        check_fractions(self.test_fraction, self.validation_fraction, "training files")
        if not self.embedded:
            own = ("modules", "test_fraction", "validation_fraction", "seed", "max_bytes")
            fields = type(self).model_fields
            used = [name for name in own if getattr(self, name) != fields[name].default]
            if used:
                raise ValueError(
                    f"{used[0]} is a setting of {PYTHON_IMPORTS}; the folder {self.corpus} has its "
                    "own splits and labels"
                )
        return self

    @property
    def embedded(self) -> bool:
        """Whether the documents are the standard library's own code."""
        return self.corpus == PYTHON_IMPORTS

    @property
    def folder(self) -> Path:
        """The folder of a corpus that is not embedded; `InputError` for an address with options."""
        body, options = split_address(self.corpus, "relation corpus")
        take_options(body, options, ())
        return expanded(body)

    @property
    def vocabulary_file(self) -> Path | None:
        """The file of a given vocabulary; `InputError` where it is not there."""
        if self.vocabulary is None:
            return None
        path = expanded(self.vocabulary)
        if not path.is_file():
            raise InputError(
                f"the vocabulary {path} does not exist; expected a WordPiece vocab.txt"
            )
        return path


@dataclass(frozen=True)
class RelationSplit:
    """The documents of one split as word pieces.

    `tokens` are the ids of each document, `labels` the numbers of its labels, `names` what each is
    called. `cut` counts the documents that were longer than `max_tokens`.
    """

    name: SplitName
    tokens: Sequence[Sequence[int]]
    labels: Sequence[Sequence[int]]
    names: Sequence[str]
    cut: int

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class RelationData(Splits[RelationSplit]):
    """A relation corpus as word pieces: three splits, the names of the labels, the padding's id.

    `vocab_size` is the configured size, which a model needs; `pieces` is the vocabulary, which may
    have fewer entries. `fingerprint` is a hash of the splits' pieces and labels themselves.
    """

    labels: tuple[str, ...]
    pad: int
    vocab_size: int
    pieces: WordPieces = field(compare=False)
    fingerprint: str


def prepare_relations(config: RelationConfig, cache_dir: Path | None = None) -> RelationData:
    """The documents of a relation corpus as word pieces, from the cache or built into it.

    A vocabulary that is not given is learned from the training split. `cache_dir` as for
    `prepare_tokens`. Raises `InputError` for a corpus or vocabulary that is missing or damaged, a
    vocabulary larger than `vocab_size`, and a split without documents.
    """
    source = imports_fingerprint() if config.embedded else folder_fingerprint(config.folder)
    given = config.vocabulary_file
    vocabulary = None if given is None else sha256_of(given)
    settings = config.model_dump(mode="json", exclude={"corpus", "vocabulary"})
    decides = [FORMAT, tokenizers.__version__, source, vocabulary, settings]

    def build(folder: Path) -> None:
        _build(folder, config)

    return _load(cache.prepared("relations", decides, build, cache_dir), config)


def read_corpus(config: RelationConfig) -> RelationCorpus:
    """The documents as text; `InputError` for a corpus that is missing or damaged."""
    if not config.embedded:
        return read_folder(config.folder)
    shares = (config.test_fraction, config.validation_fraction)
    return read_python_imports(config.modules, config.seed, *shares, config.max_bytes)


def look_for_relations(config: RelationConfig) -> None:
    """Raise `InputError` where a corpus's files or its vocabulary are not there; none is read."""
    if not config.embedded:
        split_files(config.folder)
    _ = config.vocabulary_file


def padded(
    rows: Sequence[Sequence[int]], pad: int, length: int | None = None
) -> tuple[Int64[np.ndarray, "b t"], Bool[np.ndarray, "b t"]]:
    """Rows of ids, filled up on the right to `length` (default: the longest); True is padding."""
    lengths = np.array([len(row) for row in rows])
    width = int(lengths.max()) if length is None else length
    padding = np.arange(width) >= lengths[:, None]
    ids = np.full((len(rows), width), pad, dtype=np.int64)
    ids[~padding] = np.concatenate([np.asarray(row, dtype=np.int64) for row in rows])
    return ids, padding


def _build(target: Path, config: RelationConfig) -> None:
    corpus = read_corpus(config)
    for name, documents in corpus.splits.items():
        if not documents:
            raise InputError(f"the {name} split of {config.corpus} holds no document")
    pieces = _word_pieces(config, corpus)
    pieces.save(target / _VOCABULARY)
    numbers = {label: number for number, label in enumerate(corpus.labels)}
    for name, documents in corpus.splits.items():
        ids = pieces.encode([document.text for document in documents])
        content = {
            "tokens": [row[: config.max_tokens] for row in ids],
            "labels": [[numbers[label] for label in document.labels] for document in documents],
            "names": [document.name for document in documents],
            "cut": sum(len(row) > config.max_tokens for row in ids),
        }
        io.write_json(target / f"{name}.json", content)
    about = {"labels": corpus.labels, "pad": pieces.pad, "entries": pieces.vocab_size}
    io.write_json(target / _ABOUT, about)


def _word_pieces(config: RelationConfig, corpus: RelationCorpus) -> WordPieces:
    given = config.vocabulary_file
    if given is None:
        texts = [document.text for document in corpus.splits["train"]]
        return train_word_pieces(texts, config.vocab_size, config.lower_case)
    pieces = WordPieces.load(given, config.lower_case)
    if pieces.vocab_size > config.vocab_size:
        raise InputError(
            f"{config.vocabulary} has {pieces.vocab_size:,} entries, but data.vocab_size is "
            f"{config.vocab_size:,}; set it to at least as many"
        )
    return pieces


def _load(folder: Path, config: RelationConfig) -> RelationData:
    about = read_object(folder / _ABOUT)
    splits = {
        name: RelationSplit(name=name, **read_object(folder / f"{name}.json")) for name in SPLITS
    }
    digests = cache.manifest(folder)
    made_of = [digests[name] for name in (_ABOUT, *(f"{split}.json" for split in SPLITS))]
    return RelationData(
        train=splits["train"],
        validation=splits["validation"],
        test=splits["test"],
        labels=tuple(about["labels"]),
        pad=about["pad"],
        vocab_size=config.vocab_size,
        pieces=WordPieces.load(folder / _VOCABULARY, config.lower_case),
        fingerprint=hashlib.sha256("".join(made_of).encode()).hexdigest(),
    )


class RelationBatch(NamedTuple):
    """Documents as rows: ids (B, T), what is padding (B, T), and the labels (B, K) as 0 and 1."""

    ids: Int64[np.ndarray, "b t"]
    padding: Bool[np.ndarray, "b t"]
    labels: Float32[np.ndarray, "b k"]


class RelationBatches:
    """Batches of `batch_size` documents; each epoch sees every document once, in a new order.

    The order of an epoch: all documents shuffled, then sorted by length within every 8 batches, so
    that little is padded, then the batches shuffled. What does not fill the epoch's last batch is
    left out of that epoch. Raises `InputError` when the split holds less than one batch.
    """

    def __init__(
        self, split: RelationSplit, labels: int, pad: int, batch_size: int, seed: int
    ) -> None:
        if len(split) < batch_size:
            raise InputError(
                f"the {split.name} split has {len(split):,} documents, fewer than one batch of "
                f"{batch_size:,}; lower batch_size"
            )
        self.split = split
        self.labels = labels
        self.pad = pad
        self.batch_size = batch_size
        self.seed = seed
        self.per_epoch = len(split) // batch_size
        self._lengths = np.array([len(row) for row in split.tokens])
        self._epoch = lru_cache(maxsize=2)(self._order)

    @property
    def mean_tokens(self) -> float:
        """Word pieces of a document, on average."""
        return float(self._lengths.mean())

    def batch(self, step: int, share: int = 0, shares: int = 1) -> RelationBatch:
        """Part `share` of `shares` of the batch of `step` (from 1): every `shares`-th document.

        All parts of a batch are padded to the length of its longest document. Raises `InputError`
        when the batch does not divide into so many shares.
        """
        refuse_uneven_shares(self.batch_size, "documents", share, shares)
        epoch, position = divmod(step - 1, self.per_epoch)
        chosen = self._epoch(epoch)[position]
        longest = int(self._lengths[chosen].max())
        mine = chosen[share::shares]
        ids, padding = padded([self.split.tokens[i] for i in mine], self.pad, longest)
        return RelationBatch(ids, padding, one_hot(self.split, mine, self.labels))

    def _order(self, epoch: int) -> Int64[np.ndarray, "batches b"]:
        """The documents of every batch of an epoch."""
        kept = self.per_epoch * self.batch_size
        drawn = uniforms(self.seed, epoch, 2, max(len(self.split), 2))
        order = np.argsort(drawn[0][: len(self.split)], kind="stable")[:kept]
        pool = _POOL * self.batch_size
        parts = [order[start : start + pool] for start in range(0, kept, pool)]
        by_length = [part[np.argsort(self._lengths[part], kind="stable")] for part in parts]
        batches = np.concatenate(by_length).reshape(self.per_epoch, self.batch_size)
        shuffled = np.argsort(drawn[1][: self.per_epoch], kind="stable")
        return np.asarray(batches[shuffled], dtype=np.int64)


def one_hot(
    split: RelationSplit, documents: Int64[np.ndarray, "b"], labels: int
) -> Float32[np.ndarray, "b k"]:
    """The labels of some documents of a split, 1 where one is present."""
    targets = np.zeros((len(documents), labels), dtype=np.float32)
    for row, document in enumerate(documents):
        targets[row, list(split.labels[document])] = 1.0
    return targets

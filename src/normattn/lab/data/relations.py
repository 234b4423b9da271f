"""Documents labelled by the relations they state: as word pieces, cached, in batches."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from jaxtyping import Bool, Float32, Int64
from numpy.typing import ArrayLike
from pydantic import Field, model_validator

from normattn import io
from normattn.errors import InputError
from normattn.io import expand_path, read_object, sha256_of
from normattn.lab.data.batches import epoch_order, padded, refuse_uneven_shares
from normattn.lab.data.relation_sources import parse_relations, python_imports
from normattn.lab.data.sources import SPLITS, Corpus, Document, SplitName, Splits, SplitSettings
from normattn.lab.data.store import ABOUT, Names, Ragged, Row, fill, prepared, utf8
from normattn.lab.data.tokeniser import WordPieces, train_word_pieces

FORMAT = 3
"""Raised whenever the same settings would give other files: old caches are then left alone."""
PYTHON_IMPORTS = "python-imports"
_POOL = 8
"""Batches whose documents are sorted by length among themselves."""
_VOCABULARY = "vocab.txt"


class RelationConfig(SplitSettings):
    """Which documents, how they become word pieces, and how they are split.

    - `corpus`: "python-imports" (default: the standard library's own code), a folder of train, dev
      and test files in the NYT24 form, or "hf:NAME" with rows of that form.
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
    max_bytes: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _settings_are_read(self) -> RelationConfig:
        own = ("modules", "test_fraction", "validation_fraction", "seed", "max_bytes")
        fields = type(self).model_fields
        used = [name for name in own if getattr(self, name) != fields[name].default]
        if used and not self.embedded:
            raise ValueError(
                f"{used[0]} is a setting of {PYTHON_IMPORTS}; {self.corpus} has its own splits and "
                "labels"
            )
        return self

    @property
    def embedded(self) -> bool:
        """Whether the documents are the standard library's own code."""
        return self.corpus == PYTHON_IMPORTS

    @property
    def parsed(self) -> Corpus:
        """Where the documents are read from; `InputError` where they are plainly not there."""
        if self.vocabulary is not None and not expand_path(self.vocabulary).is_file():
            raise InputError(
                f"the vocabulary {self.vocabulary} does not exist; expected a WordPiece vocab.txt"
            )
        if self.embedded:
            return python_imports(self.modules, self.split_of, self.max_bytes)
        return parse_relations(self.corpus)


@dataclass(frozen=True)
class RelationSplit:
    """The documents of one split as word pieces.

    `tokens` are the ids of each document, `labels` the numbers of its labels, `names` what each is
    called. `cut` counts the documents that were longer than `max_tokens`.
    """

    name: SplitName
    tokens: Sequence[Sequence[int]] | Ragged
    labels: Sequence[Sequence[int]] | Ragged
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
    `store.prepared`. Raises `InputError` for a corpus or vocabulary that is missing or damaged, a
    vocabulary larger than `vocab_size`, and a split without documents.
    """
    corpus = config.parsed
    vocabulary = config.vocabulary and sha256_of(expand_path(config.vocabulary))
    settings = config.model_dump(mode="json", exclude={"corpus", "vocabulary"})
    decides = [FORMAT, tokenizers.__version__, corpus.fingerprint(), vocabulary, settings]
    folder = prepared(
        "relations", decides, lambda folder: _build(folder, config, corpus), cache_dir
    )
    about = read_object(folder / ABOUT)
    pieces = WordPieces.load(folder / _VOCABULARY, config.lower_case)
    return RelationData(
        **{name: _load_split(folder, name, about["counts"]) for name in SPLITS},
        labels=tuple(about["labels"]),
        pad=pieces.pad,
        vocab_size=config.vocab_size,
        pieces=pieces,
        fingerprint=about["fingerprint"],
    )


def _load_split(folder: Path, name: SplitName, counts: Mapping[str, int]) -> RelationSplit:
    tokens, labels = (Ragged.load(folder, f"{name}.{part}", "<i4") for part in ("tokens", "labels"))
    names = Names(Ragged.load(folder, f"{name}.names", "u1"))
    return RelationSplit(name, tokens, labels, names, counts.get(f"{name} cut", 0))


def _build(folder: Path, config: RelationConfig, corpus: Corpus) -> None:
    """Fill `folder` with pieces, labels and names."""
    labels = _labels(corpus)
    numbers = {label: number for number, label in enumerate(labels)}
    if not (folder / _VOCABULARY).exists():
        _word_pieces(config, corpus).save(folder / _VOCABULARY)
    pieces = WordPieces.load(folder / _VOCABULARY, config.lower_case)

    def encode(batch: list[Document], counts: Counter[str]) -> Iterator[Row]:
        encoded = pieces.encode([document.text for document in batch])
        for document, ids in zip(batch, encoded, strict=True):
            columns: dict[str, ArrayLike] = {
                "tokens": ids[: config.max_tokens],
                "labels": [numbers[label] for label in document.labels],
                "names": utf8(document.name),
            }
            split = document.split or "train"
            counts[f"{split} cut"] += len(ids) > config.max_tokens
            yield split, columns

    columns = {"tokens": "<i4", "labels": "<i4", "names": "u1"}
    counts = fill(folder, config.corpus, columns, corpus.documents(), encode)
    splits = [_load_split(folder, name, counts) for name in SPLITS]
    fingerprint = _fingerprint(labels, pieces, splits)
    about = {"labels": labels, "counts": counts, "fingerprint": fingerprint}
    io.write_json(folder / ABOUT, about)


def _labels(corpus: Corpus) -> tuple[str, ...]:
    """The labels that the corpus lists, else all that occur, sorted.

    One that no training document has can only be missed, and still counts.
    """
    occurring, trained = set[str](), False
    for document in corpus.documents():
        occurring.update(document.labels)
        trained |= document.split in (None, "train") and bool(document.labels)
    if not trained:
        raise InputError("no document of the train split has a relation")
    listed = corpus.labels or tuple(sorted(occurring))
    if missing := sorted(occurring.difference(listed)):
        raise InputError(f"the list of labels lacks the relation {missing[0]!r}, which occurs")
    return listed


def _word_pieces(config: RelationConfig, corpus: Corpus) -> WordPieces:
    """The vocabulary that is given, or one that is learned."""
    if config.vocabulary is None:
        texts = [d.text for d in corpus.documents() if d.split in (None, "train")]
        return train_word_pieces(texts, config.vocab_size, config.lower_case)
    pieces = WordPieces.load(expand_path(config.vocabulary), config.lower_case)
    if pieces.vocab_size > config.vocab_size:
        raise InputError(
            f"{config.vocabulary} has {pieces.vocab_size:,} entries, but data.vocab_size is "
            f"{config.vocab_size:,}; set it to at least as many"
        )
    return pieces


def _fingerprint(labels: Sequence[str], pieces: WordPieces, splits: Iterable[RelationSplit]) -> str:
    """A hash of hashes: of the labels, and of each split, as indented JSON."""
    described: list[dict[str, Any]] = [
        {"labels": labels, "pad": pieces.pad, "entries": pieces.vocab_size}
    ]
    described += [
        {
            "tokens": [np.asarray(row).tolist() for row in split.tokens],
            "labels": [np.asarray(row).tolist() for row in split.labels],
            "names": list(split.names),
            "cut": split.cut,
        }
        for split in splits
    ]
    texts = (json.dumps(each, indent=2, ensure_ascii=False) + "\n" for each in described)
    digests = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


# Batches.


def one_hot(
    split: RelationSplit, documents: Int64[np.ndarray, "b"], labels: int
) -> Float32[np.ndarray, "b k"]:
    """The labels of some documents of a split, 1 where one is present."""
    targets = np.zeros((len(documents), labels), dtype=np.float32)
    for row, document in enumerate(documents):
        targets[row, list(split.labels[document])] = 1.0
    return targets


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
        order, turns = epoch_order(self.seed, epoch, len(self.split), self.per_epoch)
        pool = _POOL * self.batch_size
        parts = [order[start : min(start + pool, kept)] for start in range(0, kept, pool)]
        by_length = [part[np.argsort(self._lengths[part], kind="stable")] for part in parts]
        batches = np.concatenate(by_length).reshape(self.per_epoch, self.batch_size)
        return np.asarray(batches[turns])

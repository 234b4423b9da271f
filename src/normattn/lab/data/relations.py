"""Documents labelled with the relations they state: word pieces, cached, in batches."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from jaxtyping import Bool, Float32, Int64
from pydantic import Field, model_validator

from normattn import io
from normattn.errors import InputError
from normattn.io import expand_path
from normattn.lab.data import store
from normattn.lab.data.batches import check_shards, epoch_order, pad_rows
from normattn.lab.data.relation_sources import parse_relations, python_imports
from normattn.lab.data.sources import SPLITS, Corpus, Document, SplitName, Splits, SplitSettings
from normattn.lab.data.tokeniser import WordPieces, train_word_pieces

FORMAT = 3
"""Increased when the same settings would give other files, so that old caches are not used."""
PYTHON_IMPORTS = "python-imports"
_VOCABULARY = "vocab.txt"
_COLUMNS = ("tokens", "labels")


class RelationConfig(SplitSettings):
    """The documents, their word pieces and their splits.

    - `corpus`: "python-imports" (default: the standard library's own code), a folder of train, dev
      and test files in the NYT24 form, or "hf:NAME" with rows of that form.
    - `vocabulary`: a WordPiece vocab.txt; None (default) learns one from the training split.
    - `vocab_size`: rows of the embedding (default 30,522, BERT's), at least the entries.
    - `lower_case`: whether case and accents are dropped (default true).
    - `max_tokens`: documents are cut after this many pieces (default 128).
    - For python-imports only: `modules`, the number of labels (default 24); `test_fraction` and
      `validation_fraction` of the files (default 0.15 each); `seed` of that split; `max_bytes`,
      the most text to read (default: all).
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
    def _no_unused_settings(self) -> RelationConfig:
        if self.corpus != PYTHON_IMPORTS:  # Other corpora have their own splits and labels.
            names = ("modules", "test_fraction", "validation_fraction", "seed", "max_bytes")
            self.refuse_changed(self.corpus, *names)
        return self

    def open_corpus(self) -> Corpus:
        """Return the corpus; `InputError` if it or the vocabulary does not exist."""
        if self.vocabulary is not None and not expand_path(self.vocabulary).is_file():
            raise InputError(f"the vocabulary {self.vocabulary} (a vocab.txt) does not exist")
        if self.corpus == PYTHON_IMPORTS:
            return python_imports(self.modules, self.split_of, self.max_bytes)
        return parse_relations(self.corpus)


@dataclass(frozen=True)
class RelationSplit:
    """The documents of one split as word pieces.

    For each document `tokens` has its ids, `labels` the indices of its labels, `names` its name.
    `cut` is the number of documents that were longer than `max_tokens`.
    """

    name: SplitName
    tokens: Sequence[Sequence[int]] | store.Ragged
    labels: Sequence[Sequence[int]] | store.Ragged
    names: Sequence[str]
    cut: int

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class RelationData(Splits[RelationSplit]):
    """A relation corpus as word pieces: three splits, the names of the labels, the tokeniser.

    `vocab_size` is the configured size, which a model needs. `tokeniser` may have fewer entries.
    `fingerprint` is a hash of the splits' tokens and labels.
    """

    labels: tuple[str, ...]
    pad_id: int
    vocab_size: int
    tokeniser: WordPieces = field(compare=False)
    fingerprint: str


def prepare_relations(config: RelationConfig, cache_dir: Path | None = None) -> RelationData:
    """Return a relation corpus as word pieces, from the cache or newly encoded into it.

    Without `config.vocabulary`, one is learned from the training split. `cache_dir` is as in
    `store.cached_folder`. Raises `InputError` if the corpus or vocabulary is missing or damaged,
    the vocabulary is larger than `vocab_size`, or a split has no documents.
    """
    corpus = config.open_corpus()
    vocabulary = config.vocabulary and io.sha256_of(expand_path(config.vocabulary))
    settings = config.model_dump(mode="json", exclude={"corpus", "vocabulary"})
    key = [FORMAT, tokenizers.__version__, corpus.fingerprint(), vocabulary, settings]
    folder = store.cached_folder("relations", key, partial(_build, config, corpus), cache_dir)
    about = io.read_object(folder / store.ABOUT)
    tokeniser = WordPieces.load(folder / _VOCABULARY, config.lower_case)
    return RelationData(
        **_load_splits(folder, about["counts"]),
        labels=tuple(about["labels"]),
        pad_id=tokeniser.pad_id,
        vocab_size=config.vocab_size,
        tokeniser=tokeniser,
        fingerprint=about["fingerprint"],
    )


def _load_splits(folder: Path, counts: Mapping[str, int]) -> dict[SplitName, RelationSplit]:
    splits = {}
    for name in SPLITS:
        tokens, labels = (store.Ragged.load(folder, f"{name}.{kind}", "<i4") for kind in _COLUMNS)
        names = store.Strings.load(folder, f"{name}.names", "u1")
        splits[name] = RelationSplit(name, tokens, labels, names, counts.get(f"{name} cut", 0))
    return splits


def _build(config: RelationConfig, corpus: Corpus, folder: Path) -> None:
    labels = _label_names(corpus)
    if (folder / _VOCABULARY).exists():
        tokeniser = WordPieces.load(folder / _VOCABULARY, config.lower_case)
    elif config.vocabulary is not None:
        tokeniser = WordPieces.load(expand_path(config.vocabulary), config.lower_case)
    else:
        texts = [d.text for d in corpus.documents() if d.split in (None, "train")]
        tokeniser = train_word_pieces(texts, config.vocab_size, config.lower_case)
    if tokeniser.vocab_size > config.vocab_size:
        raise InputError(
            f"{config.vocabulary} has {tokeniser.vocab_size:,} entries, but data.vocab_size is "
            f"{config.vocab_size:,}; set it to at least as many"
        )
    tokeniser.save(folder / _VOCABULARY)

    def encode(batch: list[Document], counts: Counter[str]) -> Iterator[store.Row]:
        encoded = tokeniser.encode([document.text for document in batch])
        for document, ids in zip(batch, encoded, strict=True):
            split = document.split or "train"
            counts[f"{split} cut"] += len(ids) > config.max_tokens
            label_ids = [labels.index(label) for label in document.labels]
            tokens, name = ids[: config.max_tokens], store.utf8(document.name)
            yield split, {"tokens": tokens, "labels": label_ids, "names": name}

    columns = {**dict.fromkeys(_COLUMNS, "<i4"), "names": "u1"}
    counts = store.write_splits(folder, config.corpus, columns, corpus.documents(), encode)
    described: list[dict[str, Any]] = [
        {"labels": labels, "pad": tokeniser.pad_id, "entries": tokeniser.vocab_size}
    ]
    described += map(_describe, _load_splits(folder, counts).values())
    listed = (json.dumps(value, indent=2, ensure_ascii=False) + "\n" for value in described)
    digests = [hashlib.sha256(text.encode()).hexdigest() for text in listed]
    fingerprint = hashlib.sha256("".join(digests).encode()).hexdigest()
    io.write_json(
        folder / store.ABOUT, {"labels": labels, "counts": counts, "fingerprint": fingerprint}
    )


def _describe(split: RelationSplit) -> dict[str, Any]:
    """Return the content of a split, whose JSON is hashed."""
    return {
        "tokens": [np.asarray(row).tolist() for row in split.tokens],
        "labels": [np.asarray(row).tolist() for row in split.labels],
        "names": list(split.names),
        "cut": split.cut,
    }


def _label_names(corpus: Corpus) -> tuple[str, ...]:
    """Return the labels that the corpus lists, else all that occur in any split, sorted."""
    occurring, in_training = set[str](), False
    for document in corpus.documents():
        occurring.update(document.labels)
        in_training |= document.split in (None, "train") and bool(document.labels)
    if not in_training:
        raise InputError("no document of the train split has a relation")
    listed = corpus.labels or tuple(sorted(occurring))
    if missing := sorted(occurring.difference(listed)):
        raise InputError(f"the list of labels lacks the relation {missing[0]!r}, which occurs")
    return listed


def multi_hot(split: RelationSplit, documents: np.ndarray, num_labels: int) -> np.ndarray:
    """Return the labels of documents as float32 rows of 0 and 1, (B, K)."""
    targets = np.zeros((len(documents), num_labels), dtype=np.float32)
    for row, document in enumerate(documents):
        targets[row, list(split.labels[document])] = 1.0
    return targets


class RelationBatch(NamedTuple):
    """Documents as rows: ids (B, T), padding mask (B, T), and labels (B, K) as 0 and 1."""

    ids: Int64[np.ndarray, "b t"]
    padding: Bool[np.ndarray, "b t"]
    labels: Float32[np.ndarray, "b k"]


class RelationBatches:
    """Batches of `batch_size` documents. An epoch has each document at most once, in a new order.

    An epoch shuffles the documents, drops those of an incomplete last batch, sorts the others by
    length within every 8 batches to save padding, and shuffles the batches. Raises `InputError` for
    a split smaller than a batch.
    """

    def __init__(
        self, split: RelationSplit, num_labels: int, pad_id: int, batch_size: int, seed: int
    ) -> None:
        if len(split) < batch_size:
            raise InputError(
                f"the {split.name} split has {len(split):,} documents, fewer than one batch of "
                f"{batch_size:,}; lower batch_size"
            )
        self.split = split
        self.num_labels = num_labels
        self.pad_id = pad_id
        self.batch_size = batch_size
        self.seed = seed
        self.per_epoch = len(split) // batch_size
        self._lengths = np.array([len(row) for row in split.tokens])
        self.mean_tokens = float(self._lengths.mean())
        self._epoch_batches = lru_cache(maxsize=2)(self._make_epoch)

    def batch(self, step: int, shard: int = 0, shards: int = 1) -> RelationBatch:
        """Return shard `shard` of `shards` of the batch of `step` (from 1): every n-th document."""
        check_shards(self.batch_size, "documents", shards)
        epoch, position = divmod(step - 1, self.per_epoch)
        documents = self._epoch_batches(epoch)[position]
        longest = int(self._lengths[documents].max())
        documents = documents[shard::shards]
        ids, padding = pad_rows([self.split.tokens[i] for i in documents], self.pad_id, longest)
        return RelationBatch(ids, padding, multi_hot(self.split, documents, self.num_labels))

    def _make_epoch(self, epoch: int) -> Int64[np.ndarray, "batches b"]:
        used = self.per_epoch * self.batch_size
        order, batch_order = epoch_order(self.seed, epoch, len(self.split), self.per_epoch)
        size = 8 * self.batch_size
        pools = [order[start : min(start + size, used)] for start in range(0, used, size)]
        by_length = [pool[np.argsort(self._lengths[pool], kind="stable")] for pool in pools]
        batches = np.concatenate(by_length).reshape(self.per_epoch, self.batch_size)
        return np.asarray(batches[batch_order])

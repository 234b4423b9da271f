"""From relation documents to word pieces: read and tokenised once, cached."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Bool, Int64

from normattn import atomic
from normattn.errors import InputError
from normattn.files import expanded
from normattn.lab.data import cache
from normattn.lab.data.relations.config import RelationConfig
from normattn.lab.data.relations.documents import RELATIONS, RelationCorpus, RelationSource
from normattn.lab.data.relations.word_pieces import WordPieces, train_word_pieces
from normattn.lab.data.sources import take_options
from normattn.lab.data.splits import SPLITS, SplitName, Splits
from normattn.structured import read_object

FORMAT = 1
"""Raised whenever the same settings would give other files: old caches are then left alone."""

_ABOUT, _VOCABULARY = "about.json", "vocab.txt"


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
    folder = cache.prepared(
        "relations", _decides(config), lambda target: _build(target, config), cache_dir
    )
    return _load(folder, config)


def read_corpus(config: RelationConfig) -> RelationCorpus:
    """The documents as text; `InputError` for a corpus that is missing or damaged."""
    return _source(config).read(config)


def look_for_relations(config: RelationConfig) -> None:
    """Raise `InputError` where a corpus's files or its vocabulary are not there; none is read."""
    _source(config).look()
    if config.vocabulary is not None:
        _vocabulary(config)


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


def _decides(config: RelationConfig) -> list[Any]:
    """Everything that decides the files."""
    fields = config.model_dump(mode="json", exclude={"corpus", "vocabulary"})
    source = _source(config).fingerprint()
    return [FORMAT, tokenizers.__version__, source, _vocabulary_digest(config), fields]


def _vocabulary_digest(config: RelationConfig) -> str | None:
    return None if config.vocabulary is None else cache.sha256_of(_vocabulary(config))


def _vocabulary(config: RelationConfig) -> Path:
    """The file of a given vocabulary."""
    path = expanded(config.vocabulary or "")
    if not path.is_file():
        raise InputError(f"the vocabulary {path} does not exist; expected a WordPiece vocab.txt")
    return path


def _source(config: RelationConfig) -> RelationSource:
    kind, body, options = RELATIONS.find(config.corpus)
    take_options(body, options, ())
    return kind.parse(body)


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
        atomic.write_json(target / f"{name}.json", content)
    about = {"labels": corpus.labels, "pad": pieces.pad, "entries": pieces.vocab_size}
    atomic.write_json(target / _ABOUT, about)


def _word_pieces(config: RelationConfig, corpus: RelationCorpus) -> WordPieces:
    if config.vocabulary is None:
        texts = [document.text for document in corpus.splits["train"]]
        return train_word_pieces(texts, config.vocab_size, config.lower_case)
    pieces = WordPieces.load(expanded(config.vocabulary), config.lower_case)
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

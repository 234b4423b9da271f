"""From a corpus to tokens in files: streamed once in bounded memory, cached, split by document."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import tokenizers
from jaxtyping import UInt32
from pydantic import Field, ValidationError, model_validator

from normattn import io
from normattn.errors import InputError
from normattn.io import read_object, sha256_of
from normattn.lab.data import cache
from normattn.lab.data.batches import Tiling
from normattn.lab.data.corpora import Corpus, Document, parse_corpus
from normattn.lab.data.shards import (
    UNDIVIDED,
    CannotResumeError,
    ShardWriter,
    TokenShards,
    shard_paths,
)
from normattn.lab.data.splits import SPLITS, SplitName, check_fractions, split_of
from normattn.lab.data.synthetic import CopyTask
from normattn.lab.data.token_data import PackedNames, TokenData, TokenSplit
from normattn.lab.data.tokeniser import SAMPLE_BYTES, SEPARATOR_ID, Tokeniser, train_tokeniser
from normattn.settings import Settings

FORMAT = 3
"""Raised whenever the same settings would give other files: old caches are then left alone."""

SHARD_BYTES = 256 << 20
OnProgress = Callable[[int, int | None], None]
_INDEX, _TOKENISER = "index.json", "tokeniser.json"
_BATCH_BYTES, _BATCH_DOCUMENTS = 1 << 18, 64
_PIECE_BYTES = 1 << 20


class DataConfig(Settings):
    """Which text, how it becomes tokens, how it is split, and how much of it is tiled.

    - `corpus`: "python-source" (default), "python-packages-2026", "python-packages", a path,
      "hf:NAME" or "synthetic:copy".
    - `vocab_size`: entries of the byte-level BPE, separator included; at least 257 for text.
    - `test_fraction`, `validation_fraction`: shares of the documents (default 0.1 and 0.05).
    - `seed`: decides the split, and the tokens of a synthetic corpus (default 0).
    - `tiled_fraction`: share of the training sequences that are a random segment of
      `tiled_low` … `tiled_high` tokens repeated to the full length (default 0, 8, 32).
    - `max_bytes`: read at most this much text (default: all).
    """

    corpus: str = "python-source"
    vocab_size: int = Field(default=1024, ge=2, le=1 << 20)
    test_fraction: float = Field(default=0.1, ge=0, lt=1)
    validation_fraction: float = Field(default=0.05, ge=0, lt=1)
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    tiled_fraction: float = Field(default=0.0, ge=0, le=1)
    tiled_low: int = Field(default=8, ge=1)
    tiled_high: int = Field(default=32, ge=1)
    max_bytes: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        check_fractions(self.test_fraction, self.validation_fraction, "training text")
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

    @property
    def tiling(self) -> Tiling | None:
        """What `TrainingBatches` takes; a synthetic corpus is tiled throughout, by its periods."""
        if self.synthetic:
            task = CopyTask.parse(self.corpus)
            return Tiling(1.0, task.low, task.high)
        if self.tiled_fraction == 0:
            return None
        return Tiling(self.tiled_fraction, self.tiled_low, self.tiled_high)

    def split_of(self, document: Document) -> SplitName:
        """The split of a document."""
        shares = (self.seed, self.test_fraction, self.validation_fraction)
        return split_of(document.split_name, *shares)


def prepare_tokens(
    config: DataConfig,
    cache_dir: Path | None = None,
    on_progress: OnProgress | None = None,
) -> TokenData:
    """The tokens of a corpus, from the cache or built into it.

    The tokeniser is trained on training documents only. Text streams through in batches of about
    256 kB into shards; after an interruption the next call resumes behind the last complete shard.
    `cache_dir` defaults to $NORMATTN_CACHE, $XDG_CACHE_HOME/normattn or ~/.cache/normattn.
    `on_progress(done_bytes, total_bytes)` is called while text is tokenised; the total is None
    where it is not known. Raises `InputError` for a corpus that is missing, empty, unreadable or
    not UTF-8, and for a cache that cannot be written.
    """
    if config.synthetic:
        return CopyTask.parse(config.corpus).token_data(config.vocab_size, config.seed)
    corpus = parse_corpus(config.corpus)
    decides = [
        *(FORMAT, tokenizers.__version__, SAMPLE_BYTES, type(corpus).kind),
        *(corpus.fingerprint(), config.max_bytes, config.vocab_size),
        *(config.seed, config.test_fraction, config.validation_fraction),
    ]

    def build(folder: Path) -> None:
        build_tokens(folder, config, corpus, on_progress)

    folder = cache.prepared("tokens", decides, build, cache_dir, resumable=True)
    index = TokenIndex.read(folder)
    train, validation, test = (index.split(folder, name) for name in SPLITS)
    tokeniser = Tokeniser.load(folder / _TOKENISER)
    # The folder's name holds the corpus' fingerprint, so these are the versions it was made of.
    sources = corpus.sources()
    return TokenData(
        train, validation, test, tokeniser, config.vocab_size, index.fingerprint, sources
    )


def look_for_tokens(config: DataConfig) -> tuple[str, ...]:
    """What a plan says of the corpus: what is fetched for it. Quick, none is read or downloaded.

    Raises `InputError` where there is no such corpus, or a library that reads it is not installed.
    """
    if config.synthetic:
        CopyTask.parse(config.corpus)
        return ()
    return parse_corpus(config.corpus).notes()


class _Column(NamedTuple):
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
        path = folder / _INDEX
        try:
            return cls.model_validate(read_object(path))
        except ValidationError as error:
            raise InputError(f"{path} is damaged: it is no index of tokens") from error

    def write(self, folder: Path) -> None:
        """Write it, whole or not at all."""
        io.write_json(folder / _INDEX, self.model_dump())

    def columns(self, name: SplitName) -> tuple[_Column, _Column, _Column, _Column]:
        """The sequences of a split.

        Its tokens; where its documents begin in them, and the last one ends; the documents' names
        in UTF-8, one behind the other; where each name ends.
        """
        counts, places = self.splits[name], np.dtype("<i8")
        return (
            _Column(f"{name}.tokens", np.dtype(self.dtype), counts.tokens, self.shard_length),
            _Column(f"{name}.offsets", places, counts.documents + 1),
            _Column(f"{name}.names", np.dtype("u1"), counts.name_bytes),
            _Column(f"{name}.name_ends", places, counts.documents),
        )

    def split(self, folder: Path, name: SplitName) -> TokenSplit:
        """One split of a complete folder; what is asked for is read then."""
        tokens, offsets, names, name_ends = (
            TokenShards(column.paths(folder), column.dtype, column.length, column.shard_length)
            for column in self.columns(name)
        )
        packed = PackedNames(names, name_ends)
        return TokenSplit(name, tokens, offsets, packed, self.splits[name].text_bytes)


def build_tokens(
    folder: Path, config: DataConfig, corpus: Corpus, on_progress: OnProgress | None = None
) -> None:
    """Fill `folder` with the tokens of a corpus, or go on where a call before was interrupted.

    At every full shard the index is written: a second call passes over the documents that it counts
    without tokenising them, and leaves the same bytes as one call. What does not fit together is
    named in a warning, and everything is made anew. Raises `InputError` for a corpus that is
    unreadable or empty.
    """
    tokeniser = _trained(folder, config, corpus)
    dtype: Literal["<u2", "<u4"] = "<u2" if config.vocab_size <= 1 << 16 else "<u4"
    shard_length = max(1, SHARD_BYTES // np.dtype(dtype).itemsize)
    new = TokenIndex(tokeniser=tokeniser.fingerprint, dtype=dtype, shard_length=shard_length)

    def fill(begun: TokenIndex) -> TokenIndex:
        return _tokenise(folder, config, corpus, tokeniser, begun, on_progress)

    try:
        index = fill(_begun(folder, new))
    except CannotResumeError as error:
        warnings.warn(f"{folder} was begun, but {error}; it is made anew", stacklevel=2)
        (folder / _INDEX).unlink(missing_ok=True)
        index = fill(new)
    if index.documents == 0:
        for file in folder.iterdir():
            file.unlink()
        raise InputError(f"corpus {config.corpus!r} is empty: it holds no text")
    index.model_copy(update={"fingerprint": _fingerprint(folder, index)}).write(folder)


def _trained(folder: Path, config: DataConfig, corpus: Corpus) -> Tokeniser:
    """The tokeniser that was trained before an interruption, else one of the training text."""
    path = folder / _TOKENISER
    if not path.exists():
        documents = corpus.documents(config.max_bytes)
        texts = (document.text for document in documents if config.split_of(document) == "train")
        train_tokeniser(texts, config.vocab_size).save(path)
    return Tokeniser.load(path)


def _begun(folder: Path, new: TokenIndex) -> TokenIndex:
    """The index that was last written, `new` where there is none."""
    # A process that is killed leaves what it wrote beside.
    for leftover in folder.glob(".*"):
        leftover.unlink()
    if not (folder / _INDEX).exists():
        return new
    try:
        index = TokenIndex.read(folder)
    except InputError as error:
        raise CannotResumeError(str(error)) from error
    for name in ("tokeniser", "dtype", "shard_length"):
        if getattr(index, name) != getattr(new, name):
            raise CannotResumeError(f"its {_INDEX} is of another {name.replace('_', ' ')}")
    return index


def _tokenise(
    folder: Path,
    config: DataConfig,
    corpus: Corpus,
    tokeniser: Tokeniser,
    index: TokenIndex,
    on_progress: OnProgress | None,
) -> TokenIndex:
    """Write the documents behind those that `index` counts; the index of all of them."""
    limit, total = config.max_bytes, corpus.total_bytes()
    if limit is not None and total is not None:
        total = min(total, limit)
    documents = (document for document in corpus.documents(limit) if document.text)
    _pass_over(documents, index)
    with ExitStack() as stack:
        writers = {name: stack.enter_context(_SplitWriter(folder, name, index)) for name in SPLITS}
        for batch in _batches(documents):
            full_before = sum(writer.full_shards for writer in writers.values())
            encoded = tokeniser.encode_arrays([document.text for document in batch])
            for document, ids in zip(batch, encoded, strict=True):
                writers[config.split_of(document)].add(document, ids)
            counts = {name: writer.counts for name, writer in writers.items()}
            done = index.documents + len(batch)
            index = index.model_copy(
                update={"documents": done, "last": batch[-1].name, "splits": counts}
            )
            if sum(writer.full_shards for writer in writers.values()) > full_before:
                for writer in writers.values():
                    writer.sync()
                index.write(folder)
            if on_progress is not None:
                on_progress(sum(split.text_bytes for split in counts.values()), total)
    return index


class _SplitWriter:
    """Appends documents to the four sequences of one split, behind those that `index` counts."""

    def __init__(self, folder: Path, name: SplitName, index: TokenIndex) -> None:
        self.counts = index.splits[name]
        begun = index.documents > 0
        self._tokens, self._offsets, self._names, self._name_ends = self._writers = [
            ShardWriter(folder, column, dtype, shard_length, length if begun else 0)
            for column, dtype, length, shard_length in index.columns(name)
        ]
        if not begun:
            self._offsets.append(np.zeros(1))

    def __enter__(self) -> _SplitWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers:
            writer.close()

    @property
    def full_shards(self) -> int:
        """How many of its files of tokens are full."""
        return self._tokens.whole

    def sync(self) -> None:
        """Bring all that was added to the disk."""
        for writer in self._writers:
            writer.sync()

    def add(self, document: Document, ids: UInt32[np.ndarray, "_"]) -> None:
        """Write the tokens of one document, and where they are."""
        name = document.name.encode("utf-8", "replace")
        counts = self.counts = SplitCounts(
            documents=self.counts.documents + 1,
            tokens=self.counts.tokens + len(ids) + 1,
            text_bytes=self.counts.text_bytes + len(document.text.encode()),
            name_bytes=self.counts.name_bytes + len(name),
        )
        self._tokens.append(np.append(ids, np.uint32(SEPARATOR_ID)))
        self._offsets.append(np.array([counts.tokens]))
        self._names.append(np.frombuffer(name, np.uint8))
        self._name_ends.append(np.array([counts.name_bytes]))


def _pass_over(documents: Iterator[Document], index: TokenIndex) -> None:
    """Read the documents that `index` counts, and no further."""
    last = None
    for document in islice(documents, index.documents):
        last = document.name
    if index.documents and last != index.last:
        raise CannotResumeError(f"document {index.documents:,} is {index.last!r} no longer")


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Groups small enough to hold."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _fingerprint(folder: Path, index: TokenIndex) -> str:
    """A hash of the tokeniser and of all sequences, whatever files they are divided into."""
    digests = [sha256_of(folder / _TOKENISER)]
    for name in SPLITS:
        tokens, offsets, *names = (column.paths(folder) for column in index.columns(name))
        # Only where documents end: the first one always begins at 0.
        digests += [_digest(tokens), _digest(offsets, skipped=8), *map(_digest, names)]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _digest(paths: Iterable[Path], skipped: int = 0) -> str:
    """The sha256 of files, one behind the other, but for their first bytes."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            file.seek(skipped)
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
    return digest.hexdigest()

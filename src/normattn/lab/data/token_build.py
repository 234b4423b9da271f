"""From a corpus to the files of its tokens: streamed in bounded memory, resumable."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import UInt32

from normattn import atomic
from normattn.errors import InputError
from normattn.lab.data.cache import sha256_of
from normattn.lab.data.config import DataConfig
from normattn.lab.data.corpora import Corpus, Document
from normattn.lab.data.shard_writer import CannotResumeError, ShardWriter
from normattn.lab.data.splits import SPLITS, SplitName, split_of
from normattn.lab.data.token_index import INDEX, SplitCounts, TokenIndex
from normattn.lab.data.tokeniser import SEPARATOR_ID, Tokeniser, train_tokeniser

OnProgress = Callable[[int, int | None], None]
SHARD_BYTES = 256 << 20
TOKENISER = "tokeniser.json"
_BATCH_BYTES = 1 << 18
_BATCH_DOCUMENTS = 64
_PIECE_BYTES = 1 << 20


def build_tokens(
    folder: Path, config: DataConfig, corpus: Corpus, on_progress: OnProgress | None = None
) -> None:
    """Fill `folder` with the tokens of a corpus, or go on where a call before was interrupted.

    Documents stream through in batches of about 256 kB, into shards of at most `SHARD_BYTES`. At
    every full shard the index is written: a second call passes over the documents that it counts
    without tokenising them, and leaves the same bytes as one call. What does not fit together is
    named in a warning, and everything is made anew. `on_progress(done_bytes, total_bytes)` is
    called behind every batch. Raises `InputError` for a corpus that is unreadable or empty.
    """
    tokeniser = _tokeniser(folder, config, corpus)
    dtype: Literal["<u2", "<u4"] = "<u2" if config.vocab_size <= 1 << 16 else "<u4"
    shard_length = max(1, SHARD_BYTES // np.dtype(dtype).itemsize)
    new = TokenIndex(tokeniser=tokeniser.fingerprint, dtype=dtype, shard_length=shard_length)
    preparation = _Preparation(folder, config, corpus, tokeniser, on_progress)
    try:
        index = preparation.go_on(_begun(folder, new))
    except CannotResumeError as error:
        warnings.warn(f"{folder} was begun, but {error}; it is made anew", stacklevel=2)
        (folder / INDEX).unlink(missing_ok=True)
        index = preparation.go_on(new)
    if index.documents == 0:
        for file in folder.iterdir():
            file.unlink()
        raise InputError(f"corpus {config.corpus!r} is empty: it holds no text")
    _write(folder, index.model_copy(update={"fingerprint": _fingerprint(folder, index)}))


class _Preparation:
    """The documents of a corpus on their way into the files of a folder."""

    def __init__(
        self,
        folder: Path,
        config: DataConfig,
        corpus: Corpus,
        tokeniser: Tokeniser,
        on_progress: OnProgress | None,
    ) -> None:
        self._folder, self._config, self._corpus = folder, config, corpus
        self._tokeniser, self._on_progress = tokeniser, on_progress

    def go_on(self, index: TokenIndex) -> TokenIndex:
        """Write what comes behind the documents of `index`; the index of all of them."""
        limit, total = self._config.max_bytes, self._corpus.total_bytes()
        if limit is not None and total is not None:
            total = min(total, limit)
        documents = (document for document in self._corpus.documents(limit) if document.text)
        _pass_over(documents, index)
        with ExitStack() as stack:
            writers = {
                name: stack.enter_context(_SplitWriter(self._folder, name, index))
                for name in SPLITS
            }
            for batch in _batches(documents):
                whole = sum(writer.whole for writer in writers.values())
                self._add(batch, writers)
                counts = {name: writer.counts for name, writer in writers.items()}
                done = index.documents + len(batch)
                news = {"documents": done, "last": batch[-1].name, "splits": counts}
                index = index.model_copy(update=news)
                if sum(writer.whole for writer in writers.values()) > whole:
                    for writer in writers.values():
                        writer.sync()
                    _write(self._folder, index)
                if self._on_progress is not None:
                    self._on_progress(sum(split.text_bytes for split in counts.values()), total)
        return index

    def _add(self, batch: list[Document], writers: dict[SplitName, _SplitWriter]) -> None:
        encoded = self._tokeniser.encode_arrays([document.text for document in batch])
        for document, ids in zip(batch, encoded, strict=True):
            writers[_split(document, self._config)].add(document, ids)


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
    def whole(self) -> int:
        """How many of its shards are full."""
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


def _tokeniser(folder: Path, config: DataConfig, corpus: Corpus) -> Tokeniser:
    """The tokeniser that was trained before an interruption, else one of the training text."""
    path = folder / TOKENISER
    if not path.exists():
        documents = corpus.documents(config.max_bytes)
        texts = (document.text for document in documents if _split(document, config) == "train")
        train_tokeniser(texts, config.vocab_size).save(path)
    return Tokeniser.load(path)


def _begun(folder: Path, new: TokenIndex) -> TokenIndex:
    """The index that was last written, `new` where there is none."""
    # A process that is killed leaves what it wrote beside.
    for leftover in folder.glob(".*"):
        leftover.unlink()
    if not (folder / INDEX).exists():
        return new
    try:
        index = TokenIndex.read(folder)
    except InputError as error:
        raise CannotResumeError(str(error)) from error
    for name in ("tokeniser", "dtype", "shard_length"):
        if getattr(index, name) != getattr(new, name):
            raise CannotResumeError(f"its {INDEX} is of another {name.replace('_', ' ')}")
    return index


def _pass_over(documents: Iterator[Document], index: TokenIndex) -> None:
    """Read the documents that `index` counts, and no further."""
    last = None
    for document in islice(documents, index.documents):
        last = document.name
    if index.documents and last != index.last:
        raise CannotResumeError(f"document {index.documents:,} is {index.last!r} no longer")


def _write(folder: Path, index: TokenIndex) -> None:
    atomic.write_json(folder / INDEX, index.model_dump())


def _fingerprint(folder: Path, index: TokenIndex) -> str:
    """A hash of the tokeniser and of all sequences, whatever files they are divided into."""
    digests = [sha256_of(folder / TOKENISER)]
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


def _split(document: Document, config: DataConfig) -> SplitName:
    return split_of(
        document.split_name, config.seed, config.test_fraction, config.validation_fraction
    )


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

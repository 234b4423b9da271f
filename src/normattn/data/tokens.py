"""From a corpus to memory-mapped tokens: tokenised once, cached, split by document."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import UInt32

from normattn import atomic
from normattn.data import cache
from normattn.data.config import DataConfig
from normattn.data.corpora import Corpus, Document, parse_corpus
from normattn.data.splits import SPLITS, SplitName, split_of
from normattn.data.synthetic import CopyTask
from normattn.data.token_data import PackedNames, TokenData, TokenSplit
from normattn.data.tokeniser import SAMPLE_BYTES, SEPARATOR_ID, Tokeniser, train_tokeniser
from normattn.errors import InputError
from normattn.structured import read_object

OnProgress = Callable[[int, int | None], None]
FORMAT = 2
"""Raised whenever the same settings would give other files: old caches are then left alone."""

_BATCH_BYTES = 1 << 18
_BATCH_DOCUMENTS = 64
_STATISTICS = "statistics.json"
_TOKENISER = "tokeniser.json"


def prepare_tokens(
    config: DataConfig,
    cache_dir: Path | None = None,
    on_progress: OnProgress | None = None,
) -> TokenData:
    """The tokens of a corpus, from the cache or built into it.

    The tokeniser is trained on training documents only. Text streams through in batches of about
    256 kB. `cache_dir` defaults to $NORMATTN_CACHE, $XDG_CACHE_HOME/normattn or
    ~/.cache/normattn. `on_progress(done_bytes, total_bytes)` is called while text is tokenised;
    the total is None where it is not known. Raises `InputError` for a corpus that is missing,
    empty, unreadable or not UTF-8, and for a cache that cannot be written.
    """
    if config.synthetic:
        return CopyTask.parse(config.corpus).token_data(config.vocab_size, config.seed)
    corpus = parse_corpus(config.corpus)
    folder = cache.prepared(
        "tokens",
        _decides(config, corpus),
        lambda target: _build(target, config, corpus, on_progress),
        cache_dir,
    )
    return _load(folder, config, corpus)


def look_for_tokens(config: DataConfig) -> None:
    """Raise `InputError` where there is no such corpus; quick, none is read or downloaded."""
    if config.synthetic:
        CopyTask.parse(config.corpus)
    else:
        parse_corpus(config.corpus)


def _decides(config: DataConfig, corpus: Corpus) -> list[Any]:
    """Everything that decides the files; the tiling does not."""
    return [
        *(FORMAT, tokenizers.__version__, SAMPLE_BYTES, type(corpus).kind),
        *(corpus.fingerprint(), config.max_bytes, config.vocab_size),
        *(config.seed, config.test_fraction, config.validation_fraction),
    ]


def _build(
    folder: Path, config: DataConfig, corpus: Corpus, on_progress: OnProgress | None
) -> None:
    tokeniser = train_tokeniser(_training_texts(config, corpus), config.vocab_size)
    tokeniser.save(folder / _TOKENISER)
    total = corpus.total_bytes()
    if config.max_bytes is not None and total is not None:
        total = min(total, config.max_bytes)
    done = 0
    with ExitStack() as stack:
        writers = {name: stack.enter_context(_SplitWriter(folder, name, config)) for name in SPLITS}
        for batch in _batches(corpus.documents(config.max_bytes)):
            encoded = tokeniser.encode_arrays([document.text for document in batch])
            for document, ids in zip(batch, encoded, strict=True):
                writers[_split(document, config)].add(document, ids)
                done += len(document.text.encode())
            if on_progress is not None:
                on_progress(done, total)
    counts = {name: writer.counts for name, writer in writers.items()}
    if done == 0:
        raise InputError(f"corpus {config.corpus!r} is empty: it holds no text")
    atomic.write_json(folder / _STATISTICS, counts)


def _training_texts(config: DataConfig, corpus: Corpus) -> Iterator[str]:
    for document in corpus.documents(config.max_bytes):
        if _split(document, config) == "train":
            yield document.text


def _split(document: Document, config: DataConfig) -> SplitName:
    return split_of(
        document.split_name, config.seed, config.test_fraction, config.validation_fraction
    )


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Groups small enough to hold; documents without text are left out."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        if not document.text:
            continue
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _dtype(config: DataConfig) -> np.dtype[Any]:
    return np.dtype("<u2" if config.vocab_size <= 1 << 16 else "<u4")


class _SplitWriter:
    """Appends the documents of one split to its four files."""

    def __init__(self, folder: Path, name: SplitName, config: DataConfig) -> None:
        self.counts = {"documents": 0, "tokens": 0, "bytes": 0}
        self._dtype = _dtype(config)
        self._name_end = 0
        self._files = [path.open("wb") for path in _paths(folder, name)]

    def __enter__(self) -> _SplitWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()

    def add(self, document: Document, ids: UInt32[np.ndarray, "_"]) -> None:
        tokens, ends, names, name_ends = self._files
        name = document.name.encode("utf-8", "replace")
        self.counts["documents"] += 1
        self.counts["tokens"] += len(ids) + 1
        self.counts["bytes"] += len(document.text.encode())
        self._name_end += len(name)
        tokens.write(np.append(ids.astype(self._dtype), self._dtype.type(SEPARATOR_ID)).tobytes())
        ends.write(np.int64(self.counts["tokens"]).tobytes())
        names.write(name)
        name_ends.write(np.int64(self._name_end).tobytes())


def _paths(folder: Path, name: SplitName) -> list[Path]:
    return [folder / f"{name}.{part}" for part in ("tokens", "ends", "names", "name_ends")]


def _load(folder: Path, config: DataConfig, corpus: Corpus) -> TokenData:
    tokeniser = Tokeniser.load(folder / _TOKENISER)
    counts = read_object(folder / _STATISTICS)
    digests = cache.manifest(folder)
    made_of = [digests[_TOKENISER]]
    splits: dict[SplitName, TokenSplit] = {}
    for name in SPLITS:
        paths = _paths(folder, name)
        made_of += [digests[path.name] for path in paths]
        splits[name] = _load_split(name, paths, _dtype(config), counts[name]["bytes"])
    fingerprint = hashlib.sha256("".join(made_of).encode()).hexdigest()
    return TokenData(
        train=splits["train"],
        validation=splits["validation"],
        test=splits["test"],
        tokeniser=tokeniser,
        vocab_size=config.vocab_size,
        fingerprint=fingerprint,
        # The folder's name holds the corpus' fingerprint, so these are the versions it was made of.
        sources=corpus.sources(),
    )


def _load_split(
    name: SplitName, paths: list[Path], dtype: np.dtype[Any], text_bytes: int
) -> TokenSplit:
    tokens, ends, names, name_ends = paths
    offsets = np.concatenate([np.zeros(1, np.int64), np.fromfile(ends, dtype=np.int64)])
    packed = PackedNames(_mapped(names, np.dtype(np.uint8)), np.fromfile(name_ends, np.int64))
    return TokenSplit(name, _mapped(tokens, dtype), offsets, packed, text_bytes)


def _mapped(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    """The file as an array that is read on demand; an empty file cannot be mapped."""
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")

"""From a corpus to memory-mapped tokens: tokenised once, cached, split by document."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import tokenizers

from normattn.lab.data import cache
from normattn.lab.data.config import DataConfig
from normattn.lab.data.corpora import Corpus, parse_corpus
from normattn.lab.data.synthetic import CopyTask
from normattn.lab.data.token_build import TOKENISER, OnProgress, build_tokens
from normattn.lab.data.token_data import TokenData
from normattn.lab.data.token_index import TokenIndex
from normattn.lab.data.tokeniser import SAMPLE_BYTES, Tokeniser

FORMAT = 3
"""Raised whenever the same settings would give other files: old caches are then left alone."""


def prepare_tokens(
    config: DataConfig,
    cache_dir: Path | None = None,
    on_progress: OnProgress | None = None,
) -> TokenData:
    """The tokens of a corpus, from the cache or built into it.

    The tokeniser is trained on training documents only. Text streams through in batches of about
    256 kB into shards that are mapped when they are read; after an interruption the next
    call resumes behind the last complete shard. `cache_dir` defaults to $NORMATTN_CACHE,
    $XDG_CACHE_HOME/normattn or ~/.cache/normattn. `on_progress(done_bytes, total_bytes)` is called
    while text is tokenised; the total is None where it is not known. Raises `InputError` for a
    corpus that is missing, empty, unreadable or not UTF-8, and for a cache that cannot be written.
    """
    if config.synthetic:
        return CopyTask.parse(config.corpus).token_data(config.vocab_size, config.seed)
    corpus = parse_corpus(config.corpus)

    def build(folder: Path) -> None:
        older = cache.folder_of("tokens", _decides(config, corpus, FORMAT - 1), cache_dir)
        if older.exists():
            warnings.warn(f"{older} is of an older format; its tokens are made again", stacklevel=2)
        build_tokens(folder, config, corpus, on_progress)

    decides = _decides(config, corpus)
    folder = cache.prepared("tokens", decides, build, cache_dir, resumable=True)
    return _load(folder, config, corpus)


def look_for_tokens(config: DataConfig) -> tuple[str, ...]:
    """What a plan says of the corpus: what is fetched for it. Quick, none is read or downloaded.

    Raises `InputError` where there is no such corpus, or a library that reads it is not installed.
    """
    if config.synthetic:
        CopyTask.parse(config.corpus)
        return ()
    return parse_corpus(config.corpus).notes()


def _decides(config: DataConfig, corpus: Corpus, version: int = FORMAT) -> list[Any]:
    """Everything that decides the files; the tiling does not."""
    return [
        *(version, tokenizers.__version__, SAMPLE_BYTES, type(corpus).kind),
        *(corpus.fingerprint(), config.max_bytes, config.vocab_size),
        *(config.seed, config.test_fraction, config.validation_fraction),
    ]


def _load(folder: Path, config: DataConfig, corpus: Corpus) -> TokenData:
    index = TokenIndex.read(folder)
    return TokenData(
        train=index.split(folder, "train"),
        validation=index.split(folder, "validation"),
        test=index.split(folder, "test"),
        tokeniser=Tokeniser.load(folder / TOKENISER),
        vocab_size=config.vocab_size,
        fingerprint=index.fingerprint,
        # The folder's name holds the corpus' fingerprint, so these are the versions it was made of.
        sources=corpus.sources(),
    )

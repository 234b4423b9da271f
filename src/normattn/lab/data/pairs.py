"""Sentence pairs as tokens: cached, split by sentence, in batches of similar length."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
from jaxtyping import Int64
from pydantic import Field

from normattn import io
from normattn.errors import InputError
from normattn.lab.data import store
from normattn.lab.data.batches import epoch_order, pad_rows
from normattn.lab.data.pair_sources import parse_pairs
from normattn.lab.data.sources import SPLITS, Corpus, Document, SplitName, Splits, SplitSettings
from normattn.lab.data.tokeniser import SAMPLE_BYTES, Tokeniser, train_tokeniser

FORMAT = 3
"""Increased when the same settings would give other files, so that old caches are not used."""
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
SPECIALS = ("<pad>", "<bos>", "<eos>")
MULTIPLE = 8
"""Lengths are padded to a multiple of this, and batches have a multiple of it as rows."""
_SIDES = ("source", "target")
TOKENISER = "tokeniser.json"


class PairsConfig(SplitSettings):
    """The sentence pairs of a translation model.

    - `corpus`: "catalogues" (default), a folder of train/val/test files by language, two aligned
      files as "FILE,FILE", a .jsonl, .parquet, .csv or .tsv file, or "hf:NAME".
    - `source`, `target`: the languages (default en and de).
    - `vocab_size`: entries of the byte-level BPE of both languages, 3 special tokens included.
    - `test_fraction`, `validation_fraction`: shares of the pairs if the corpus does not define
      these splits (default 0.1 and 0.05); `seed` decides which.
    - `max_length`: drop training pairs with more tokens on a side, its end included.
    - `max_pairs`: train on the first `max_pairs` pairs (default: all).
    """

    corpus: str = "catalogues"
    source: str = "en"
    target: str = "de"
    vocab_size: int = Field(default=4000, ge=256 + len(SPECIALS), le=1 << 16)
    max_length: int = Field(default=100, ge=2)
    max_pairs: int | None = Field(default=None, ge=1)

    def open_corpus(self) -> Corpus:
        """Return the corpus of pairs; `InputError` if its files do not exist."""
        return parse_pairs(self.corpus, self.source, self.target)


@dataclass(frozen=True)
class PairSplit:
    """The pairs of one split, without special tokens; `texts` are the sentences if held out."""

    name: SplitName
    source: store.Ragged
    target: store.Ragged
    texts: Sequence[tuple[str, str]] = ()

    def __len__(self) -> int:
        return len(self.source)

    def source_ids(self, index: int) -> list[int]:
        """Return the encoder's input for a pair: its tokens and the end token."""
        return [*self.source[index].tolist(), EOS_ID]

    def target_ids(self, index: int) -> list[int]:
        """Return the translation of a pair between the begin and end tokens."""
        return [BOS_ID, *self.target[index].tolist(), EOS_ID]

    def first(self, count: int | None) -> PairSplit:
        """Return the first `count` pairs, all if None."""
        if count is None or count >= len(self):
            return self
        source, target = (
            store.Ragged(side.values[: int(side.offsets[count])], side.offsets[: count + 1])
            for side in (self.source, self.target)
        )
        return PairSplit(self.name, source, target, self.texts[:count])

    def fingerprint(self, data: str) -> str:
        """Hash which pairs these are, given the fingerprint `data` of all data."""
        return hashlib.sha256(f"{data}/{self.name}/{len(self)}".encode()).hexdigest()

    @property
    def target_total(self) -> int:
        """Number of tokens to predict, the end tokens included."""
        return len(self.target.values) + len(self)


@dataclass(frozen=True)
class PairData(Splits[PairSplit]):
    """A corpus of sentence pairs in three splits, and its tokeniser.

    `left_out` counts the dropped pairs by reason: an empty side, or too long for training.
    `fingerprint` is a hash of the tokens and texts.
    """

    tokeniser: Tokeniser
    left_out: Mapping[str, int]
    fingerprint: str


def prepare_pairs(config: PairsConfig, cache_dir: Path | None = None) -> PairData:
    """Return the tokens of sentence pairs, from the cache or newly encoded into it.

    The tokeniser is trained on the training split only. If splits are drawn, pairs whose source
    sentences have the same letters are in the same split. `cache_dir` is as in
    `store.cached_folder`. Raises `InputError` for missing, unaligned or unreadable pairs.
    """
    corpus = config.open_corpus()
    settings = config.model_dump(mode="json", exclude={"corpus"})
    key = [FORMAT, tokenizers.__version__, SAMPLE_BYTES, corpus.fingerprint(), settings]
    folder = store.cached_folder("pairs", key, partial(_build, config, corpus), cache_dir)
    about = io.read_object(folder / store.ABOUT)
    splits = {}
    for name in SPLITS:
        source, target = (store.Ragged.load(folder, f"{name}.{side}", "<u2") for side in _SIDES)
        lines = map(json.loads, store.Strings.load(folder, f"{name}.texts", "u1"))
        splits[name] = PairSplit(name, source, target, tuple(map(tuple, lines)))
    return PairData(
        **splits,
        tokeniser=Tokeniser.load(folder / TOKENISER),
        left_out=about["left_out"],
        fingerprint=about["fingerprint"],
    )


def _build(config: PairsConfig, corpus: Corpus, folder: Path) -> None:
    own_splits = corpus.own_splits()
    names = [f"{split}_fraction" for split in own_splits]
    config.refuse_changed(config.corpus, *names, *(["seed"] if len(names) == 2 else []))

    def pairs() -> Iterator[Document]:
        """Yield every pair with its split; white space is normalised."""
        for pair in corpus.documents():
            source, target = " ".join(pair.text.split()), " ".join(pair.target.split())
            letters = "".join(c for c in source.casefold() if c.isalpha()) or source
            split = pair.split or config.split_of(letters, own_splits)
            yield Document(pair.name, source, split=split, target=target)

    def encode(batch: list[Document], counts: Counter[str]) -> Iterator[store.Row]:
        complete = [pair for pair in batch if pair.text and pair.target]
        if len(complete) < len(batch):
            counts["with an empty side"] += len(batch) - len(complete)
        sources = tokeniser.encode_batch([pair.text for pair in complete])
        targets = tokeniser.encode_batch([pair.target for pair in complete])
        for pair, source, target in zip(complete, sources, targets, strict=True):
            row = {"source": source, "target": target}
            if pair.split in ("validation", "test"):
                line = json.dumps([pair.text, pair.target], ensure_ascii=False) + "\n"
                yield pair.split, {**row, "texts": store.utf8(line)}
            elif max(len(source), len(target)) >= config.max_length:
                counts["training pairs too long"] += 1
            elif counts["train"] != config.max_pairs:
                yield "train", row

    if not (folder / TOKENISER).exists():
        complete = (pair for pair in pairs() if pair.text and pair.target)
        training = (pair for pair in complete if pair.split == "train")
        chosen = islice(training, config.max_pairs)
        texts = (text for pair in chosen for text in (pair.text, pair.target))
        train_tokeniser(texts, config.vocab_size, specials=SPECIALS).save(folder / TOKENISER)
    tokeniser = Tokeniser.load(folder / TOKENISER)
    columns = {"source": "<u2", "target": "<u2", "texts": "u1"}
    counts = store.write_splits(folder, config.corpus, columns, pairs(), encode)
    left_out = {why: count for why, count in counts.items() if why not in SPLITS}
    fingerprint = _fingerprint(folder, {name: counts[name] for name in SPLITS}, left_out)
    io.write_json(folder / store.ABOUT, {"left_out": left_out, "fingerprint": fingerprint})


def _fingerprint(folder: Path, sizes: Mapping[str, int], left_out: Mapping[str, int]) -> str:
    counts = json.dumps({"pairs": sizes, "left_out": left_out}, indent=2) + "\n"
    digests = {"statistics.json": hashlib.sha256(counts.encode()).hexdigest()}
    for side, name in product(_SIDES, SPLITS):
        values, ends = store.column_digests(folder, f"{name}.{side}")
        digests |= {f"{name}.{side}.tokens": values, f"{name}.{side}.ends": ends}
    digests |= {f"{side}.tokeniser.json": io.sha256_of(folder / TOKENISER) for side in _SIDES}
    digests |= {f"{name}.jsonl": io.sha256_of(folder / f"{name}.texts") for name in SPLITS[1:]}
    text = "".join(f"{name}{digest}" for name, digest in sorted(digests.items()))
    return hashlib.sha256(text.encode()).hexdigest()


class PairBatch(NamedTuple):
    """Sentence pairs as rows, padded with 0 on the right.

    `source` (rows, S) has an end token. `target` (rows, T + 1) has begin and end tokens: the
    decoder reads `target[:, :-1]` and predicts `target[:, 1:]`. Filler rows, whose target is the
    begin token alone, are not scored. `targets` () counts the tokens to predict in all shards.
    """

    source: Int64[np.ndarray, "rows S"]
    target: Int64[np.ndarray, "rows T_1"]
    targets: Int64[np.ndarray, ""]


class PairBatches:
    """Batches of at most `batch_tokens` padded source and target tokens together.

    Sentences are sorted by their padded lengths (multiples of 8) and cut into batches. Every epoch
    shuffles sentences of equal lengths and the order of the batches. The cuts are the same in every
    epoch, so each has `len(self)` batches and every sentence is in exactly one. A batch has a
    multiple of 8 rows. Raises `InputError` if 8 of the longest sentences do not fit into one.
    """

    def __init__(self, split: PairSplit, batch_tokens: int, seed: int) -> None:
        self.split = split
        self.seed = seed
        # Padded lengths, special tokens included.
        self._source = -(-(split.source.lengths + 1) // MULTIPLE) * MULTIPLE
        self._target = -(-(split.target.lengths + 1) // MULTIPLE) * MULTIPLE
        order = np.lexsort((self._target, self._source))
        self._cuts = _cut_batches(self._source[order], self._target[order], batch_tokens)
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return len(self._cuts) - 1

    def batch(self, step: int, shard: int = 0, shards: int = 1) -> PairBatch:
        """Return shard `shard` of `shards` of the batch of `step` (from 1), of equal row counts."""
        if MULTIPLE % shards:
            several = "1, 2, 4 or 8 processes and micro-batches"
            raise InputError(f"a batch of pairs is shared by {several}, not by {shards}")
        epoch, position = divmod(step - 1, len(self))
        order, batch_order = self._order(epoch)
        cut = int(batch_order[position])
        rows = order[self._cuts[cut] : self._cuts[cut + 1]].tolist()
        sources, targets = [], []
        # Every `shards`-th row: rows are sorted by length, and shards should take equal time.
        for index in range(shard, len(rows) + -len(rows) % MULTIPLE, shards):
            filler = index >= len(rows)
            row = rows[0 if filler else index]
            sources.append(self.split.source_ids(row))
            targets.append([BOS_ID] if filler else self.split.target_ids(row))
        source, _ = pad_rows(sources, PAD_ID, int(self._source[rows].max()))
        target, _ = pad_rows(targets, PAD_ID, int(self._target[rows].max()) + 1)
        return PairBatch(source, target, (self.split.target.lengths[rows] + 1).sum())

    def _epoch_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the sorted sentences of an epoch, and the order of its batches."""
        order, batch_order = epoch_order(self.seed, epoch, len(self.split), len(self))
        return order[np.lexsort((self._target[order], self._source[order]))], batch_order


def _cut_batches(
    source_lengths: np.ndarray, target_lengths: np.ndarray, batch_tokens: int
) -> list[int]:
    """Cut sorted sentences into batches of as many groups of 8 as fit; return the boundaries."""
    cuts, rows, batch_source, batch_target = [0], 0, 0, 0
    for start in range(0, len(source_lengths), MULTIPLE):
        source = int(source_lengths[start : start + MULTIPLE].max())
        target = int(target_lengths[start : start + MULTIPLE].max())
        if MULTIPLE * (source + target) > batch_tokens:
            raise InputError(
                f"{MULTIPLE} pairs of {source} source and {target} target tokens make "
                f"{MULTIPLE * (source + target)} tokens, more than batch_tokens ({batch_tokens}): "
                "raise it, or lower data.max_length"
            )
        rows += MULTIPLE
        batch_source, batch_target = max(batch_source, source), max(batch_target, target)
        if rows * (batch_source + batch_target) > batch_tokens:
            cuts.append(start)
            batch_source, batch_target, rows = source, target, MULTIPLE
    return [*cuts, len(source_lengths)]

"""Sentence pairs as tokens: cached, split by sentence, in batches of like length."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
from jaxtyping import Int64
from pydantic import Field

from normattn import io
from normattn.errors import InputError
from normattn.io import read_object, sha256_of
from normattn.lab.data.batches import epoch_order, padded
from normattn.lab.data.pair_sources import parse_pairs
from normattn.lab.data.sources import SPLITS, Corpus, Document, SplitName, Splits, SplitSettings
from normattn.lab.data.store import (
    ABOUT,
    Names,
    Ragged,
    Row,
    column_digests,
    fill,
    prepared,
    utf8,
)
from normattn.lab.data.tokeniser import SAMPLE_BYTES, Tokeniser, train_tokeniser

FORMAT = 3
"""Raised whenever the same settings would give other files: old caches are then left alone."""
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
SPECIALS = ("<pad>", "<bos>", "<eos>")
PADDED_TO = 8
"""Lengths are padded to a multiple of this, and rows come in multiples of it."""
_SIDES = ("source", "target")
TOKENISER = "tokeniser.json"
_EMPTY, _LONG = "with an empty side", "training pairs too long"


class PairsConfig(SplitSettings):
    """The sentence pairs of a translation model.

    - `corpus`: "catalogues" (default), a folder of train/val/test files by language, two aligned
      files as "FILE,FILE", a .jsonl, .parquet, .csv or .tsv file, or "hf:NAME".
    - `source`, `target`: the languages (default en and de).
    - `vocab_size`: entries of the byte-level BPE of both languages, three special ones included.
    - `test_fraction`, `validation_fraction`: shares of the pairs where the corpus has no such split
      of its own (default 0.1 and 0.05); `seed` decides which.
    - `max_length`: training pairs with more tokens on a side (its end included) are left out.
    - `max_pairs`: train on the first so many pairs (default: all).
    """

    corpus: str = "catalogues"
    source: str = "en"
    target: str = "de"
    vocab_size: int = Field(default=4000, ge=256 + len(SPECIALS), le=1 << 16)
    max_length: int = Field(default=100, ge=2)
    max_pairs: int | None = Field(default=None, ge=1)

    @property
    def parsed(self) -> Corpus:
        """Where the pairs are read from; `InputError` where their files are not there."""
        return parse_pairs(self.corpus, self.source, self.target)


@dataclass(frozen=True)
class PairSplit:
    """The pairs of one split: sentence i of a side is its row i, without special tokens.

    `texts` are kept of held-out pairs only (empty for training).
    """

    name: SplitName
    source: Ragged
    target: Ragged
    texts: Sequence[tuple[str, str]] = ()

    def __len__(self) -> int:
        return len(self.source)

    def source_ids(self, index: int) -> list[int]:
        """What the encoder reads of a pair: its tokens and the end of the sentence."""
        return [*self.source[index].tolist(), EOS_ID]

    def target_ids(self, index: int) -> list[int]:
        """A pair's translation between beginning and end."""
        return [BOS_ID, *self.target[index].tolist(), EOS_ID]

    def first(self, count: int | None) -> PairSplit:
        """The first `count` pairs (None: all of them)."""
        if count is None or count >= len(self):
            return self
        source, target = (
            Ragged(side.values[: int(side.offsets[count])], side.offsets[: count + 1])
            for side in (self.source, self.target)
        )
        return PairSplit(self.name, source, target, self.texts[:count])

    def fingerprint(self, data: str) -> str:
        """A hash of which pairs these are, of the data with the fingerprint `data`."""
        return hashlib.sha256(f"{data}/{self.name}/{len(self)}".encode()).hexdigest()

    @property
    def target_total(self) -> int:
        """Tokens to predict in all, the ends of the sentences included."""
        return len(self.target.values) + len(self)


@dataclass(frozen=True)
class PairData(Splits[PairSplit]):
    """A corpus of sentence pairs in three splits, its tokeniser, and what was left out.

    `left_out` counts pairs with an empty side and training pairs that are too long. `fingerprint`
    is a hash of the tokens and texts.
    """

    tokeniser: Tokeniser
    left_out: Mapping[str, int]
    fingerprint: str

    def facts(self) -> str:
        """The sizes in one sentence."""
        sizes = ", ".join(f"{len(split):,} {split.name}" for split in self)
        skipped = ", ".join(f"{count:,} {why}" for why, count in self.left_out.items() if count)
        return f"{sizes} pairs" + (f" (left out: {skipped})" if skipped else "")


def prepare_pairs(config: PairsConfig, cache_dir: Path | None = None) -> PairData:
    """The tokens of sentence pairs, from the cache or built into it.

    The tokeniser is trained on the training side only. Pairs with the same letters in their source
    sentence fall into the same split where splits are drawn. `cache_dir` as for `store.prepared`.
    Raises `InputError` for pairs that are missing, not aligned or unreadable, and for a split
    without a pair.
    """
    corpus = config.parsed
    settings = config.model_dump(mode="json", exclude={"corpus"})
    decides = [FORMAT, tokenizers.__version__, SAMPLE_BYTES, corpus.fingerprint(), settings]
    folder = prepared("pairs", decides, lambda folder: _build(folder, config, corpus), cache_dir)
    about = read_object(folder / ABOUT)
    return PairData(
        **{name: _load_split(folder, name) for name in SPLITS},
        tokeniser=Tokeniser.load(folder / TOKENISER),
        left_out=about["left_out"],
        fingerprint=about["fingerprint"],
    )


def _load_split(folder: Path, name: SplitName) -> PairSplit:
    source, target = (Ragged.load(folder, f"{name}.{side}", "<u2") for side in _SIDES)
    lines = Names(Ragged.load(folder, f"{name}.texts", "u1"))
    texts = tuple((here, there) for here, there in map(json.loads, lines))
    return PairSplit(name, source, target, texts)


def _build(folder: Path, config: PairsConfig, corpus: Corpus) -> None:
    """Fill `folder` with the tokens of both sides, and the texts of held-out pairs."""
    given = corpus.given()

    def cleaned() -> Iterator[Document]:
        """Every pair, a side in one line each, and its split."""
        for pair in corpus.documents():
            here, there = " ".join(pair.text.split()), " ".join(pair.target.split())
            letters = "".join(c for c in here.casefold() if c.isalpha()) or here
            split = pair.split or config.split_of(letters, given)
            yield Document(pair.name, here, split=split, target=there)

    def training() -> Iterator[Document]:
        pairs = (pair for pair in cleaned() if pair.split == "train" and pair.text and pair.target)
        return islice(pairs, config.max_pairs)

    def encode(batch: list[Document], counts: Counter[str]) -> Iterator[Row]:
        filled = [pair for pair in batch if pair.text and pair.target]
        if len(filled) < len(batch):
            counts[_EMPTY] += len(batch) - len(filled)
        sides = [pair.text for pair in filled], [pair.target for pair in filled]
        encoded = [tokeniser.encode_batch(side) for side in sides]
        for pair, here, there in zip(filled, *encoded, strict=True):
            columns = {"source": here, "target": there}
            if pair.split in ("validation", "test"):
                line = json.dumps([pair.text, pair.target], ensure_ascii=False) + "\n"
                yield pair.split, {**columns, "texts": utf8(line)}
            elif max(len(here), len(there)) >= config.max_length:
                counts[_LONG] += 1
            elif counts["train"] != config.max_pairs:
                yield "train", columns

    if not (folder / TOKENISER).exists():
        both = (text for pair in training() for text in (pair.text, pair.target))
        train_tokeniser(both, config.vocab_size, specials=SPECIALS).save(folder / TOKENISER)
    tokeniser = Tokeniser.load(folder / TOKENISER)
    columns = {"source": "<u2", "target": "<u2", "texts": "u1"}
    counts = fill(folder, config.corpus, columns, cleaned(), encode)
    left_out = {why: count for why, count in counts.items() if why not in SPLITS}
    fingerprint = _fingerprint(folder, {name: counts[name] for name in SPLITS}, left_out)
    io.write_json(folder / ABOUT, {"left_out": left_out, "fingerprint": fingerprint})


def _fingerprint(folder: Path, pairs: Mapping[str, int], left_out: Mapping[str, int]) -> str:
    """A hash of the tokeniser, the numbers of pairs, their tokens and the held-out texts."""
    counts = json.dumps({"pairs": pairs, "left_out": left_out}, indent=2) + "\n"
    digests = {"statistics.json": hashlib.sha256(counts.encode()).hexdigest()}
    for side in _SIDES:
        digests[f"{side}.tokeniser.json"] = sha256_of(folder / TOKENISER)
        for name in SPLITS:
            values, ends = column_digests(folder, f"{name}.{side}")
            digests |= {f"{name}.{side}.tokens": values, f"{name}.{side}.ends": ends}
    for name in SPLITS[1:]:
        digests[f"{name}.jsonl"] = sha256_of(folder / f"{name}.texts")
    text = "".join(f"{name}{digest}" for name, digest in sorted(digests.items()))
    return hashlib.sha256(text.encode()).hexdigest()


# Batches.


class PairBatch(NamedTuple):
    """Sentence pairs as rows, padded with 0 on the right.

    `source` (rows, S) ends each sentence with its end; `target` (rows, T + 1) is between
    beginning and end: what the decoder reads is `target[:, :-1]`, what it predicts `target[:, 1:]`.
    A row whose target is the beginning alone fills the batch up and is scored nowhere. `targets`
    () counts the tokens to predict in the whole batch, of which this may be a share.
    """

    source: Int64[np.ndarray, "rows S"]
    target: Int64[np.ndarray, "rows T_1"]
    targets: Int64[np.ndarray, ""]


class PairBatches:
    """Batches of at most `batch_tokens` padded source and target tokens together.

    Sentences are sorted by their padded lengths (a multiple of 8 each) and cut into batches;
    within equal lengths they are shuffled again in every epoch, and so is the order of the
    batches. The cuts are the same in every epoch, so there are `len(self)` batches in each, and
    every sentence is in exactly one of them. Rows come in multiples of 8: the last batch of the
    sorting may hold rows that are not scored.
    Raises `InputError` when the longest sentences do not fit into a batch, 8 at a time.
    """

    def __init__(self, split: PairSplit, batch_tokens: int, seed: int) -> None:
        self.split = split
        self.batch_tokens = batch_tokens
        self.seed = seed
        self._source = _padded(split.source.lengths + 1)
        self._target = _padded(split.target.lengths + 1)
        order = np.lexsort((self._target, self._source))
        self._cuts = _cut(self._source[order], self._target[order], batch_tokens)
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self._cuts) - 1

    def batch(self, step: int, share: int = 0, shares: int = 1) -> PairBatch:
        """Part `share` of `shares` of the batch of `step` (from 1), in equal numbers of rows."""
        if PADDED_TO % shares or not 0 <= share < shares:
            raise InputError(
                f"a batch of sentence pairs is shared by 1, 2, 4 or 8 processes and micro-batches, "
                f"not by {shares} (share {share})"
            )
        epoch, position = divmod(step - 1, len(self))
        order, turns = self._order(epoch)
        cut = int(turns[position])
        rows = order[self._cuts[cut] : self._cuts[cut + 1]]
        size = int(self._source[rows].max()), int(self._target[rows].max())
        filler = -len(rows) % PADDED_TO
        # Every `shares`-th row: the rows are sorted by length, and shares should take equal time.
        mine = np.concatenate([rows, np.repeat(rows[:1], filler)])[share::shares].tolist()
        scored = (np.arange(len(rows) + filler) < len(rows))[share::shares]
        source, _ = padded([self.split.source_ids(row) for row in mine], PAD_ID, size[0])
        sentences = [
            self.split.target_ids(row) if kept else [BOS_ID]
            for row, kept in zip(mine, scored, strict=True)
        ]
        target, _ = padded(sentences, PAD_ID, size[1] + 1)
        return PairBatch(source, target, (self.split.target.lengths[rows] + 1).sum())

    def _epoch_order(
        self, epoch: int
    ) -> tuple[Int64[np.ndarray, "sentences"], Int64[np.ndarray, "batches"]]:
        """The sentences in this epoch's sorting, and the order in which its batches are taken."""
        order, turns = epoch_order(self.seed, epoch, len(self.split), len(self))
        return order[np.lexsort((self._target[order], self._source[order]))], turns


def _padded(lengths: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "n"]:
    return -(-lengths // PADDED_TO) * PADDED_TO


def _cut(
    source: Int64[np.ndarray, "n"], target: Int64[np.ndarray, "n"], batch_tokens: int
) -> list[int]:
    """Where batches begin and end in the sorted sentences: as many rows of 8 as fit."""
    cuts, rows, wide, high = [0], 0, 0, 0
    for start in range(0, len(source), PADDED_TO):
        here = int(source[start : start + PADDED_TO].max())
        there = int(target[start : start + PADDED_TO].max())
        if PADDED_TO * (here + there) > batch_tokens:
            raise InputError(
                f"{PADDED_TO} pairs of {here} source and {there} target tokens make "
                f"{PADDED_TO * (here + there)} tokens, more than batch_tokens ({batch_tokens}): "
                "raise it, or lower data.max_length"
            )
        wide, high, rows = max(wide, here), max(high, there), rows + PADDED_TO
        if rows * (wide + high) > batch_tokens:
            cuts.append(start)
            wide, high, rows = here, there, PADDED_TO
    return [*cuts, len(source)]

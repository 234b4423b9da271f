"""Sentence pairs as tokens: tokenised once, cached, split by sentence, in batches of like length.

A batch is a pure function of (seed, step): nothing is shuffled in place, stored or advanced, so a
resumed run, or another number of processes, sees the same sentences.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
from jaxtyping import Int64, UInt16
from pydantic import Field, model_validator

from normattn import io
from normattn.errors import InputError
from normattn.io import read_object
from normattn.lab.data import cache
from normattn.lab.data.batches import uniforms
from normattn.lab.data.pair_sources import Pair, PairSource, parse_pairs
from normattn.lab.data.shards import UNDIVIDED, TokenShards
from normattn.lab.data.splits import SPLITS, SplitName, Splits, check_fractions, split_of
from normattn.lab.data.tokeniser import SAMPLE_BYTES, Tokeniser, train_tokeniser
from normattn.settings import Settings

FORMAT = 1
"""Raised whenever the same settings would give other files: old caches are then left alone."""
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
SPECIALS = ("<pad>", "<bos>", "<eos>")
LEAST_VOCABULARY = 256 + len(SPECIALS)
PADDED_TO = 8
"""Lengths are padded to a multiple of this, and rows come in multiples of it."""
_BATCH = 512
_STATISTICS = "statistics.json"
_SIDES = ("source", "target")
_EMPTY, _LONG = "with an empty side", "training pairs too long"


class PairsConfig(Settings):
    """The sentence pairs of a translation model.

    - `corpus`: "catalogues" (default), a folder of train/val/test files by language, two aligned
      files as "FILE,FILE", or a .jsonl file.
    - `source`, `target`: the languages (default en and de).
    - `vocab_size`: entries of the byte-level BPE, the three special ones included: of the shared
      vocabulary, or of the source's where `target_vocab_size` gives the target its own.
    - `test_fraction`, `validation_fraction`: shares of the pairs where the corpus has no such split
      of its own (default 0.1 and 0.05); `seed` decides which.
    - `max_length`: training pairs with more tokens on a side (its end included) are left out.
    - `max_pairs`: train on the first so many pairs (default: all).
    """

    corpus: str = "catalogues"
    source: str = "en"
    target: str = "de"
    vocab_size: int = Field(default=4000, ge=LEAST_VOCABULARY, le=1 << 16)
    target_vocab_size: int | None = Field(default=None, ge=LEAST_VOCABULARY, le=1 << 16)
    test_fraction: float = Field(default=0.1, ge=0, lt=1)
    validation_fraction: float = Field(default=0.05, ge=0, lt=1)
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    max_length: int = Field(default=100, ge=2)
    max_pairs: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _leaves_training_pairs(self) -> PairsConfig:
        check_fractions(self.test_fraction, self.validation_fraction, "training pairs")
        return self

    @property
    def pairs(self) -> PairSource:
        """Where the pairs are read from; `InputError` where their files are not there."""
        return parse_pairs(self.corpus, self.source, self.target)


@dataclass(frozen=True)
class Side:
    """One language of a split: sentence i is `tokens[offsets[i] : offsets[i + 1]]`."""

    tokens: UInt16[np.ndarray, "tokens"] | TokenShards
    offsets: Int64[np.ndarray, "sentences_1"]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def sentence(self, index: int) -> UInt16[np.ndarray, "length"]:
        """The tokens of one sentence, without special ones."""
        return self.tokens[int(self.offsets[index]) : int(self.offsets[index + 1])]

    @cached_property
    def lengths(self) -> Int64[np.ndarray, "sentences"]:
        """Tokens of every sentence, without special ones."""
        return np.diff(self.offsets)


@dataclass(frozen=True)
class PairSplit:
    """The pairs of one split; `texts` are kept of held-out pairs only (empty for training)."""

    name: SplitName
    source: Side
    target: Side
    texts: Sequence[tuple[str, str]] = ()

    def __len__(self) -> int:
        return len(self.source)

    def source_ids(self, index: int) -> list[int]:
        """What the encoder reads of a pair: its tokens and the end of the sentence."""
        return [*self.source.sentence(index).tolist(), EOS_ID]

    def target_ids(self, index: int) -> list[int]:
        """A pair's translation between beginning and end."""
        return [BOS_ID, *self.target.sentence(index).tolist(), EOS_ID]

    def first(self, count: int | None) -> PairSplit:
        """The first `count` pairs (None: all of them)."""
        if count is None or count >= len(self):
            return self
        source, target = (
            Side(side.tokens[: int(side.offsets[count])], side.offsets[: count + 1])
            for side in (self.source, self.target)
        )
        return PairSplit(self.name, source, target, self.texts[:count])

    def fingerprint(self, data: str) -> str:
        """A hash of which pairs these are, of the data with the fingerprint `data`."""
        return hashlib.sha256(f"{data}/{self.name}/{len(self)}".encode()).hexdigest()

    @property
    def source_total(self) -> int:
        """Source tokens in all, the ends of the sentences included."""
        return len(self.source.tokens) + len(self)

    @property
    def target_total(self) -> int:
        """Tokens to predict in all, the ends of the sentences included."""
        return len(self.target.tokens) + len(self)


@dataclass(frozen=True)
class PairData(Splits[PairSplit]):
    """A corpus of sentence pairs in three splits, its tokenisers, and what was left out.

    With a shared vocabulary both tokenisers are one. `left_out` counts pairs with an empty side
    and training pairs that are too long. `fingerprint` is a hash of the tokens and texts.
    """

    source_tokeniser: Tokeniser
    target_tokeniser: Tokeniser
    left_out: Mapping[str, int]
    fingerprint: str

    def facts(self) -> str:
        """The sizes in one sentence."""
        sizes = ", ".join(f"{len(split):,} {split.name}" for split in self)
        skipped = ", ".join(f"{count:,} {why}" for why, count in self.left_out.items() if count)
        return f"{sizes} pairs" + (f" (left out: {skipped})" if skipped else "")


def prepare_pairs(config: PairsConfig, cache_dir: Path | None = None) -> PairData:
    """The tokens of sentence pairs, from the cache or built into it.

    Tokenisers are trained on the training side only. Pairs with the same letters in their source
    sentence fall into the same split where splits are drawn. `cache_dir` defaults as in
    `prepare_tokens`. Raises `InputError` for pairs that are missing, not aligned or unreadable,
    and for a split without a pair.
    """
    source = config.pairs
    settings = config.model_dump(mode="json") | {"corpus": [source.kind, source.fingerprint]}
    decides = [FORMAT, tokenizers.__version__, SAMPLE_BYTES, settings]

    def build(folder: Path) -> None:
        _Build(folder, config, source).run()

    return _load(cache.prepared("pairs", decides, build, cache_dir), config)


def look_for_pairs(config: PairsConfig) -> None:
    """Raise `InputError` where the pairs' files are not there; quick, none is read through."""
    _ = config.pairs


class _Build:
    """One cached folder in the making."""

    def __init__(self, folder: Path, config: PairsConfig, source: PairSource) -> None:
        self.folder = folder
        self.config = config
        self.source = source
        self.left_out = Counter[str]()

    def run(self) -> None:
        tokenisers = self._tokenisers()
        for side, tokeniser in zip(_SIDES, tokenisers, strict=True):
            tokeniser.save(self.folder / f"{side}.tokeniser.json")
        counts = Counter[str]()
        with ExitStack() as stack:
            writers = {n: stack.enter_context(_Writer(self.folder, n)) for n in SPLITS}
            pairs = self._pairs(self.left_out)
            while batch := list(islice(pairs, _BATCH)):
                sides = zip(*(pair[:2] for _, pair in batch), strict=True)
                encoded = [t.encode_batch(s) for t, s in zip(tokenisers, sides, strict=True)]
                for (split, pair), *both in zip(batch, *encoded, strict=True):
                    if self._fits(split, both, counts):
                        counts[split] += 1
                        writers[split].add(pair, both)
        for name in SPLITS:
            if not counts[name]:
                raise InputError(
                    f"corpus {self.config.corpus!r} gives no {name} pair "
                    f"({sum(counts.values()):,} in all)"
                )
        facts = {"pairs": {n: counts[n] for n in SPLITS}, "left_out": dict(self.left_out)}
        io.write_json(self.folder / _STATISTICS, facts)

    def _pairs(self, left_out: Counter[str]) -> Iterator[tuple[SplitName, Pair]]:
        """Every pair with two sides, in one line each, and its split."""
        config, given = self.config, self.source.given
        test = 0.0 if "test" in given else config.test_fraction
        validation = 0.0 if "validation" in given else config.validation_fraction
        for raw in self.source.read():
            pair = Pair(" ".join(raw.source.split()), " ".join(raw.target.split()), raw.split)
            if not (pair.source and pair.target):
                left_out[_EMPTY] += 1
                continue
            letters = "".join(c for c in pair.source.casefold() if c.isalpha()) or pair.source
            yield pair.split or split_of(letters, config.seed, test, validation), pair

    def _tokenisers(self) -> tuple[Tokeniser, Tokeniser]:
        """Those of both sides: one, trained on both, where they share a vocabulary."""
        config = self.config
        if config.target_vocab_size is None:
            texts = (text for pair in self._training() for text in pair[:2])
            shared = train_tokeniser(texts, config.vocab_size, specials=SPECIALS)
            return shared, shared
        sources = (pair.source for pair in self._training())
        targets = (pair.target for pair in self._training())
        return (
            train_tokeniser(sources, config.vocab_size, specials=SPECIALS),
            train_tokeniser(targets, config.target_vocab_size, specials=SPECIALS),
        )

    def _training(self) -> Iterator[Pair]:
        training = (pair for split, pair in self._pairs(Counter()) if split == "train")
        return islice(training, self.config.max_pairs)

    def _fits(self, split: SplitName, ids: list[list[int]], counts: Counter[str]) -> bool:
        """Whether a pair is kept; those that are held out always are."""
        if split != "train":
            return True
        if counts["train"] == self.config.max_pairs:
            return False
        if max(map(len, ids)) < self.config.max_length:
            return True
        self.left_out[_LONG] += 1
        return False


class _Writer:
    """Appends the pairs of one split to its files; texts of held-out ones only."""

    def __init__(self, folder: Path, name: SplitName) -> None:
        self._stack = ExitStack()
        open_file = self._stack.enter_context
        self._texts = None
        if name != "train":
            self._texts = open_file((folder / f"{name}.jsonl").open("w", encoding="utf-8"))
        paths = [_paths(folder, name, side) for side in _SIDES]
        self._files = [(open_file(a.open("wb")), open_file(b.open("wb"))) for a, b in paths]
        self._ends = [0, 0]

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, pair: Pair, ids: list[list[int]]) -> None:
        for side, (tokens, ends) in enumerate(self._files):
            self._ends[side] += len(ids[side])
            tokens.write(np.array(ids[side], dtype="<u2").tobytes())
            ends.write(np.int64(self._ends[side]).tobytes())
        if self._texts is not None:
            print(json.dumps(pair[:2], ensure_ascii=False), file=self._texts)


def _paths(folder: Path, split: str, side: str) -> tuple[Path, Path]:
    return folder / f"{split}.{side}.tokens", folder / f"{split}.{side}.ends"


def _load(folder: Path, config: PairsConfig) -> PairData:
    source = target = Tokeniser.load(folder / "source.tokeniser.json")
    if config.target_vocab_size is not None:
        target = Tokeniser.load(folder / "target.tokeniser.json")
    train, validation, test = (_load_split(folder, name) for name in SPLITS)
    left_out = read_object(folder / _STATISTICS)["left_out"]
    digests = "".join(f"{name}{digest}" for name, digest in sorted(cache.manifest(folder).items()))
    fingerprint = hashlib.sha256(digests.encode()).hexdigest()
    return PairData(train, validation, test, source, target, left_out, fingerprint)


def _load_split(folder: Path, name: SplitName) -> PairSplit:
    sides = []
    for side in _SIDES:
        tokens, ends = _paths(folder, name, side)
        offsets = np.concatenate([np.zeros(1, np.int64), np.fromfile(ends, dtype=np.int64)])
        shards = TokenShards([tokens], np.dtype("<u2"), int(offsets[-1]), UNDIVIDED)
        sides.append(Side(shards, offsets))
    texts: tuple[tuple[str, str], ...] = ()
    if name != "train":
        with (folder / f"{name}.jsonl").open(encoding="utf-8") as lines:
            texts = tuple((pair[0], pair[1]) for pair in map(json.loads, lines))
    return PairSplit(name, sides[0], sides[1], texts)


class PairBatch(NamedTuple):
    """Sentence pairs as rows, padded with 0 on the right.

    `source` (rows, S) ends each sentence with its end; `target` (rows, T + 1) stands between
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
    within equal lengths their order is drawn anew for every epoch, and so is the order of the
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

    @property
    def padded_tokens(self) -> int:
        """Padded source and target tokens of an epoch: what its steps compute."""
        sizes = self.shapes()
        return int((sizes[:, 0] * (sizes[:, 1] + sizes[:, 2])).sum())

    def shapes(self) -> Int64[np.ndarray, "batches 3"]:
        """Rows, source length and target length of every batch of an epoch, in sorted order."""
        order = np.lexsort((self._target, self._source))
        shapes = []
        for start, stop in zip(self._cuts[:-1], self._cuts[1:], strict=True):
            rows = order[start:stop]
            full = -(-len(rows) // PADDED_TO) * PADDED_TO
            shapes.append((full, self._source[rows].max(), self._target[rows].max()))
        return np.array(shapes, dtype=np.int64)

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
        mine = np.concatenate([rows, np.repeat(rows[:1], filler)])[share::shares]
        scored = (np.arange(len(rows) + filler) < len(rows))[share::shares]
        target = np.full((len(mine), size[1] + 1), PAD_ID, dtype=np.int64)
        target[:, 0] = BOS_ID
        _fill(target[:, 1:], self.split.target, np.where(scored, mine, -1))
        source = np.full((len(mine), size[0]), PAD_ID, dtype=np.int64)
        _fill(source, self.split.source, mine)
        return PairBatch(source, target, (self.split.target.lengths[rows] + 1).sum())

    def _epoch_order(
        self, epoch: int
    ) -> tuple[Int64[np.ndarray, "sentences"], Int64[np.ndarray, "batches"]]:
        """The sentences in this epoch's sorting, and the order in which its batches are taken."""
        drawn = uniforms(self.seed, epoch, len(self.split) + len(self), 1)[:, 0]
        order = np.lexsort((drawn[: len(self.split)], self._target, self._source))
        return order, np.argsort(drawn[len(self.split) :], kind="stable")


def _padded(lengths: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "n"]:
    return -(-lengths // PADDED_TO) * PADDED_TO


def _cut(
    source: Int64[np.ndarray, "n"], target: Int64[np.ndarray, "n"], batch_tokens: int
) -> list[int]:
    """Where batches begin and end in the sorted sentences: as many rows of 8 as fit."""
    cuts, rows, wide, high = [0], 0, 0, 0
    for start in range(0, len(source), PADDED_TO):
        here = source[start : start + PADDED_TO], target[start : start + PADDED_TO]
        new = max(wide, int(here[0].max())), max(high, int(here[1].max()))
        if PADDED_TO * sum((int(here[0].max()), int(here[1].max()))) > batch_tokens:
            need = PADDED_TO * (int(here[0].max()) + int(here[1].max()))
            raise InputError(
                f"{PADDED_TO} pairs of {here[0].max()} source and {here[1].max()} target tokens "
                f"make {need} tokens, more than batch_tokens ({batch_tokens}): raise it, or lower "
                "data.max_length"
            )
        if rows and (rows + PADDED_TO) * sum(new) > batch_tokens:
            cuts.append(start)
            rows, new = 0, (int(here[0].max()), int(here[1].max()))
        rows += PADDED_TO
        wide, high = new
    return [*cuts, len(source)]


def _fill(
    into: Int64[np.ndarray, "rows width"], side: Side, rows: Int64[np.ndarray, "rows"]
) -> None:
    """Write sentences and their ends into padded rows; row −1 writes nothing."""
    for index, row in enumerate(rows.tolist()):
        if row >= 0:
            sentence = side.sentence(row)
            into[index, : len(sentence)] = sentence
            into[index, len(sentence)] = EOS_ID

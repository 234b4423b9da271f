"""From sentence pairs to memory-mapped tokens: tokenised once, cached, split by sentence."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from normattn import atomic
from normattn.errors import InputError
from normattn.lab.data import cache
from normattn.lab.data.pairs.config import SPECIALS, PairsConfig
from normattn.lab.data.pairs.pair_data import PairData, PairSplit, Side
from normattn.lab.data.pairs.source import Languages, Pair, PairSource, parse_pairs
from normattn.lab.data.splits import SPLITS, SplitName, split_of
from normattn.lab.data.tokeniser import SAMPLE_BYTES, Tokeniser, train_tokeniser
from normattn.structured import read_object

FORMAT = 1
"""Raised whenever the same settings would give other files: old caches are then left alone."""

_BATCH = 512
_STATISTICS = "statistics.json"
_SIDES = ("source", "target")
_EMPTY, _LONG = "with an empty side", "training pairs too long"


def prepare_pairs(config: PairsConfig, cache_dir: Path | None = None) -> PairData:
    """The tokens of sentence pairs, from the cache or built into it.

    Tokenisers are trained on the training side only. Pairs with the same letters in their source
    sentence fall into the same split where splits are drawn. `cache_dir` defaults as in
    `prepare_tokens`. Raises `InputError` for pairs that are missing, not aligned or unreadable,
    and for a split without a pair.
    """
    source = parse_pairs(config.corpus, Languages(config.source, config.target))
    folder = cache.prepared(
        "pairs",
        _decides(config, source),
        lambda target: _Build(target, config, source).run(),
        cache_dir,
    )
    return _load(folder, config)


def look_for_pairs(config: PairsConfig) -> None:
    """Raise `InputError` where the pairs' files are not there; quick, none is read through."""
    source = parse_pairs(config.corpus, Languages(config.source, config.target))
    source.given()
    source.fingerprint()


def _decides(config: PairsConfig, source: PairSource) -> list[Any]:
    """Everything that decides the files."""
    decides = config.model_dump(mode="json") | {"corpus": [type(source).kind, source.fingerprint()]}
    return [FORMAT, tokenizers.__version__, SAMPLE_BYTES, decides]


class _Build:
    """One cached folder in the making."""

    def __init__(self, folder: Path, config: PairsConfig, source: PairSource) -> None:
        self.folder = folder
        self.config = config
        self.source = source
        given = source.given()
        self._fractions = (
            0.0 if "test" in given else config.test_fraction,
            0.0 if "validation" in given else config.validation_fraction,
        )
        self._left_out = Counter[str]()

    def run(self) -> None:
        tokenisers = self._tokenisers()
        for side, tokeniser in zip(_SIDES, tokenisers, strict=True):
            tokeniser.save(self.folder / f"{side}.tokeniser.json")
        counts = Counter[str]()
        with ExitStack() as stack:
            writers = {n: stack.enter_context(_Writer(self.folder, n)) for n in SPLITS}
            for batch in _batches(self._pairs(self._left_out)):
                encoded = [
                    tokenisers[0].encode_batch([pair.source for _, pair in batch]),
                    tokenisers[1].encode_batch([pair.target for _, pair in batch]),
                ]
                for (split, pair), *both in zip(batch, *encoded, strict=True):
                    if self._fits(split, both, counts):
                        counts[split] += 1
                        writers[split].add(pair, both)
        self._refuse_empty(counts)
        facts = {"pairs": {n: counts[n] for n in SPLITS}, "left_out": dict(self._left_out)}
        atomic.write_json(self.folder / _STATISTICS, facts)

    def _pairs(self, left_out: Counter[str]) -> Iterator[tuple[SplitName, Pair]]:
        for raw in self.source.pairs():
            pair = raw._replace(
                source=" ".join(raw.source.split()), target=" ".join(raw.target.split())
            )
            if pair.source and pair.target:
                yield pair.split or self._drawn(pair), pair
            else:
                left_out[_EMPTY] += 1

    def _drawn(self, pair: Pair) -> SplitName:
        letters = "".join(c for c in pair.source.casefold() if c.isalpha()) or pair.source
        return split_of(letters, self.config.seed, *self._fractions)

    def _tokenisers(self) -> tuple[Tokeniser, Tokeniser]:
        config = self.config

        def train(sides: Iterable[str], size: int) -> Tokeniser:
            return train_tokeniser(sides, size, specials=SPECIALS)

        if config.target_vocab_size is None:
            shared = train((text for p in self._training() for text in p[:2]), config.vocab_size)
            return shared, shared
        return (
            train((pair.source for pair in self._training()), config.vocab_size),
            train((pair.target for pair in self._training()), config.target_vocab_size),
        )

    def _training(self) -> Iterator[Pair]:
        taken = 0
        for split, pair in self._pairs(Counter()):
            if split == "train" and taken != self.config.max_pairs:
                taken += 1
                yield pair

    def _fits(self, split: SplitName, ids: list[list[int]], counts: Counter[str]) -> bool:
        """Whether a pair is kept; those that are held out always are."""
        if split != "train":
            return True
        if counts["train"] == self.config.max_pairs:
            return False
        if max(map(len, ids)) < self.config.max_length:
            return True
        self._left_out[_LONG] += 1
        return False

    def _refuse_empty(self, counts: Counter[str]) -> None:
        for name in SPLITS:
            if not counts[name]:
                raise InputError(
                    f"corpus {self.config.corpus!r} gives no {name} pair "
                    f"({sum(counts.values()):,} in all)"
                )


def _batches(pairs: Iterable[tuple[SplitName, Pair]]) -> Iterator[list[tuple[SplitName, Pair]]]:
    batch: list[tuple[SplitName, Pair]] = []
    for pair in pairs:
        batch.append(pair)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


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
    if not config.shared_vocabulary:
        target = Tokeniser.load(folder / "target.tokeniser.json")
    splits = {name: _load_split(folder, name) for name in SPLITS}
    facts = read_object(folder / _STATISTICS)
    digests = "".join(f"{name}{digest}" for name, digest in sorted(cache.manifest(folder).items()))
    return PairData(
        train=splits["train"],
        validation=splits["validation"],
        test=splits["test"],
        source_tokeniser=source,
        target_tokeniser=target,
        left_out=facts["left_out"],
        fingerprint=hashlib.sha256(digests.encode()).hexdigest(),
    )


def _load_split(folder: Path, name: SplitName) -> PairSplit:
    sides = []
    for side in _SIDES:
        tokens, ends = _paths(folder, name, side)
        offsets = np.concatenate([np.zeros(1, np.int64), np.fromfile(ends, dtype=np.int64)])
        sides.append(Side(np.memmap(tokens, dtype="<u2", mode="r"), offsets))
    texts: tuple[tuple[str, str], ...] = ()
    if name != "train":
        with (folder / f"{name}.jsonl").open(encoding="utf-8") as lines:
            texts = tuple((pair[0], pair[1]) for pair in map(json.loads, lines))
    return PairSplit(name, sides[0], sides[1], texts)

"""Training batches and images: pure functions of (seed, step) whose shares make up the whole."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normattn.errors import InputError
from normattn.lab.data.batches import (
    MaskedBatches,
    Masking,
    TrainingBatches,
    scale_to_int,
    uniforms,
)
from normattn.lab.data.images import (
    ImageBatches,
    ImageDataConfig,
    image_shape,
    prepare_images,
    scale_pixels,
    shift_images,
)
from normattn.lab.data.pairs import PairBatches, PairSplit
from normattn.lab.data.relations import RelationBatches, RelationSplit
from normattn.lab.data.store import Ragged
from normattn.lab.data.tokens import Tiling

from .helpers import make_images, make_split

SPLIT = make_split([700, 3, 1200, 900])


def test_the_drawn_numbers_are_those_of_every_numpy() -> None:
    # Fixed by the Philox algorithm, not by numpy's distributions: these may never change.
    expected = np.random.Philox(key=np.array([3, 4], dtype=np.uint64)).random_raw(4)
    found = uniforms(3, 4, 2, 2)
    np.testing.assert_array_equal(found.ravel(), [int(word) // 2**11 / 2**53 for word in expected])
    assert found[0, 0] == 0.9854694359165987
    edge = np.array([0.0, np.nextafter(1.0, 0.0)])
    np.testing.assert_array_equal(scale_to_int(edge, 2**53), [0, 2**53 - 1])
    np.testing.assert_array_equal(scale_to_int(edge, np.array([1, 5])), [0, 4])


# Masked text.


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 40),
    share=st.floats(0.01, 1.0),
    seed=st.integers(0, 2**63 - 1),
    separators=st.integers(0, 40),
)
def test_only_chosen_tokens_change_and_their_targets_are_kept(
    length: int, share: float, seed: int, separators: int
) -> None:
    tokens = np.arange(1, 6 * length + 1, dtype=np.int64).reshape(6, length)
    tokens[:, : min(separators, length)] = 0
    rows = Masking(share=share).rows(tokens, 500, seed)
    chosen = max(1, round(share * length))
    assert rows.positions.shape == rows.targets.shape == (6, chosen)
    assert (np.diff(rows.positions, axis=1) > 0).all()
    again = rows.ids.copy()
    np.put_along_axis(again, rows.positions, rows.targets, 1)
    np.testing.assert_array_equal(again, tokens)
    assert (rows.ids <= 500).all()
    left = length - min(separators, length)
    assert ((rows.targets == 0).sum(1) == max(0, chosen - left)).all()


def test_the_shares_are_those_of_the_source() -> None:
    tokens = np.tile(np.arange(1, 101, dtype=np.int64), (4000, 1))
    rows = Masking().rows(tokens, 101, 7)
    shown = np.take_along_axis(rows.ids, rows.positions, 1)
    masked, kept = shown == 101, shown == rows.targets
    assert shown.size == 4000 * 15
    assert abs(masked.mean() - 0.8) < 0.006
    # A token drawn at random is the right one in one of a hundred cases.
    assert abs(kept.mean() - (0.1 + 0.1 / 100)) < 0.005
    others = np.bincount(shown[~masked & ~kept], minlength=102)[1:101]
    assert others.min() > 0
    assert (shown > 0).all()
    # Every position is chosen equally often: the standard error is 0.0056.
    assert abs(np.bincount(rows.positions.ravel(), minlength=100) / 4000 - 0.15).max() < 0.03


# Sentence pairs.


def pair_split(lengths: list[tuple[int, int]]) -> PairSplit:
    """Sentences whose every token is 3 + their number."""

    def side(which: int) -> Ragged:
        sizes = [pair[which] for pair in lengths]
        tokens = np.repeat(np.arange(len(sizes)) + 3, sizes).astype(np.uint16)
        return Ragged(tokens, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))

    return PairSplit("train", side(0), side(1))


LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=90)


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(0, 5), st.sampled_from([512, 700, 2048]), st.sampled_from([1, 2, 8]))
def test_every_epoch_holds_every_sentence_once(
    lengths: list[tuple[int, int]], seed: int, tokens: int, shares: int
) -> None:
    batches = PairBatches(pair_split(lengths), tokens, seed)
    for epoch in range(2):
        seen = Counter[int]()
        for step in range(epoch * len(batches) + 1, (epoch + 1) * len(batches) + 1):
            parts = [batches.batch(step, share, shares) for share in range(shares)]
            assert len({part.source.shape for part in parts}) == 1
            rows, width = (sum(p.source.shape[0] for p in parts), parts[0].source.shape[1])
            height = parts[0].target.shape[1] - 1
            assert rows % 8 == 0
            assert (width % 8, height % 8) == (0, 0)
            assert rows * (width + height) <= tokens
            scored = sum(int((part.target[:, 1:] != 0).sum()) for part in parts)
            assert scored == parts[0].targets
            for part in parts:
                for source, target in zip(part.source, part.target, strict=True):
                    word = int(source[0])
                    wide, high = lengths[word - 3]
                    assert source.tolist() == [word] * wide + [2] + [0] * (width - wide - 1)
                    if target[1] == 0:  # fills the batch up
                        assert target.tolist() == [1] + [0] * height
                        continue
                    seen[word - 3] += 1
                    rest = [0] * (height - high - 1)
                    assert target.tolist() == [1] + [word] * high + [2] + rest
        assert seen == Counter(range(len(lengths)))


# Documents with labels.


def relation_split(lengths: list[int]) -> RelationSplit:
    """Document i is made of the token i + 1 alone and has label i mod 3."""
    tokens = [[i + 1] * length for i, length in enumerate(lengths)]
    labels = [[i % 3] for i in range(len(lengths))]
    return RelationSplit("train", tokens, labels, [f"d{i}" for i in range(len(lengths))], 0)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=4, max_size=40), st.integers(1, 4), st.integers(0, 99))
def test_an_epoch_holds_no_document_twice(lengths: list[int], batch_size: int, seed: int) -> None:
    batches = RelationBatches(relation_split(lengths), 3, 0, batch_size, seed)
    seen: Counter[int] = Counter()
    for step in range(1, batches.per_epoch + 1):
        batch = batches.batch(step)
        documents = batch.ids[:, 0] - 1
        seen.update(documents.tolist())
        assert ((batch.ids == 0) == batch.padding).all()
        assert (~batch.padding).sum(1).tolist() == [lengths[i] for i in documents]
        assert (batch.labels.argmax(1) == documents % 3).all()
        assert (batch.labels.sum(1) == 1).all()
    assert max(seen.values()) == 1
    assert len(seen) == len(lengths) // batch_size * batch_size


# Every kind.


def test_impossible_batches_are_refused() -> None:
    with pytest.raises(InputError, match=r"test split is too small .* has 12 tokens and 13 are"):
        TrainingBatches(make_split([5, 5]), 12, 2, 0)
    with pytest.raises(InputError, match=r"lower data\.tiled_high"):
        TrainingBatches(SPLIT, 16, 2, 0, Tiling(0.5, 8, 32))
    with pytest.raises(InputError, match=r"make 512 tokens, more than batch_tokens \(500\)"):
        PairBatches(pair_split([(30, 30)]), 500, 0)


PAIRS = pair_split([(1 + n % 13, 1 + n % 7) for n in range(200)])
RELATIONS = relation_split([1 + i % 7 for i in range(50)])
KINDS: dict[str, Callable[[int], Any]] = {
    "text": lambda seed: TrainingBatches(SPLIT, 16, 8, seed, Tiling(0.4, 3, 9)),
    "masked text": lambda seed: MaskedBatches(KINDS["text"](seed), Masking(), 3000),
    "pairs": lambda seed: PairBatches(PAIRS, 600, seed),
    "documents": lambda seed: RelationBatches(RELATIONS, 3, 0, 8, seed),
    "images": lambda seed: ImageBatches(make_images(30), 8, seed, shift=1),
}


def arrays(batch: Any) -> list[np.ndarray]:
    """The arrays of a batch that have rows."""
    parts = batch if isinstance(batch, tuple) else (batch,)
    return [part for part in parts if part.ndim]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(steps=st.lists(st.integers(1, 200), min_size=2, max_size=6), seed=st.integers(0, 2**63 - 1))
def test_a_batch_is_a_function_of_seed_and_step(kind: str, steps: list[int], seed: int) -> None:
    drawn = KINDS[kind](seed)
    before = {step: arrays(drawn.batch(step)) for step in steps}
    for step in reversed(steps):
        assert all(map(np.array_equal, arrays(KINDS[kind](seed).batch(step)), before[step]))


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_and_epochs_differ(kind: str) -> None:
    def drawn(seed: int, first: int) -> bytes:
        batches = KINDS[kind](seed)
        return b"".join(arrays(batches.batch(first + k))[0].tobytes() for k in range(6))

    epoch = len(KINDS["pairs"](0)) if kind == "pairs" else 6
    assert len({drawn(3, 1), drawn(4, 1), drawn(3, 1 + epoch)}) == 3


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(shares=st.sampled_from([1, 2, 4, 8]), step=st.integers(1, 2**20), seed=st.integers(0, 99))
def test_shares_make_up_the_batch(kind: str, shares: int, step: int, seed: int) -> None:
    batches = KINDS[kind](seed)
    parts = [arrays(KINDS[kind](seed).batch(step, share, shares)) for share in range(shares)]
    for whole, *each in zip(arrays(batches.batch(step)), *parts, strict=True):
        if kind in ("pairs", "documents"):  # every so manyth row
            together = np.stack(each, axis=1).reshape(whole.shape)
        else:
            together = np.concatenate(each)
        np.testing.assert_array_equal(together, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_shares_that_would_lose_rows_are_refused(kind: str) -> None:
    with pytest.raises(InputError, match=r"(into|by) 3"):
        KINDS[kind](0).batch(1, 0, 3)


# Images.
@pytest.mark.parametrize(("source", "count", "side"), [("digits", 1797, 8), ("mnist5k", 5000, 28)])
def test_sets_that_packages_carry(source: str, count: int, side: int) -> None:
    config = ImageDataConfig(source=source)
    data = prepare_images(config)
    splits = (data.train, data.validation, data.test)
    sizes = {"height": side, "width": side, "channels": 1, "classes": 10}
    assert image_shape(config) == sizes
    names = [set(each.names) for each in splits]
    assert sum(map(len, names)) == len(set.union(*names)) == count
    assert 0.17 < len(data.test) / count < 0.23
    assert 0.07 < len(data.validation) / count < 0.13
    for each in splits:
        assert set(each.labels.tolist()) == set(range(10))
    assert data.train.pixels.max() == 255
    assert prepare_images(config).fingerprint == data.fingerprint
    other = prepare_images(ImageDataConfig(source=source, seed=1))
    assert other.fingerprint != data.fingerprint
    assert other.test.names != data.test.names


def test_sets_that_are_not_there() -> None:
    for read in (ImageDataConfig.plan_notes, prepare_images, image_shape):
        with pytest.raises(InputError, match="'digit': did you mean digits"):
            read(ImageDataConfig(source="digit"))
    with pytest.raises(InputError, match="test split of digits has no image"):
        prepare_images(ImageDataConfig(source="digits", test_fraction=0))


@given(st.integers(1, 8), st.integers(1, 40), st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_every_image_once_an_epoch(batch: int, steps: int, seed: int) -> None:
    """The stream of steps is one permutation after another, whatever the batch size."""
    batches = ImageBatches(make_images(10), batch, seed)
    seen = np.concatenate([batches.batch(step)[1] for step in range(1, steps + 1)])
    for first in range(0, len(seen) - 9, 10):
        assert sorted(seen[first : first + 10]) == list(range(10))


def test_shifts_move_and_repeat_the_border() -> None:
    pixels = np.arange(9, dtype=np.uint8).reshape(1, 3, 3, 1)
    moved = shift_images(pixels, np.array([[1, -1]]))[0, ..., 0]
    np.testing.assert_array_equal(moved, [[1, 2, 2], [1, 2, 2], [4, 5, 5]])
    assert (shift_images(pixels, np.array([[0, 0]])) == pixels).all()
    batches = ImageBatches(make_images(1), 1, 0, shift=1)
    seen = {batches.batch(step)[0].tobytes() for step in range(1, 60)}
    moves = (np.array([move]) for move in itertools.product((-1, 0, 1), repeat=2))
    moved_images = (shift_images(batches.split.pixels, move) for move in moves)
    assert seen == {scale_pixels(each).tobytes() for each in moved_images}
    with pytest.raises(InputError, match="leaves no pixels of images of 4 × 4"):
        ImageBatches(make_images(1), 1, 0, shift=4)

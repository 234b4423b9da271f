"""Training batches: pure functions of (seed, step) whose shares make up the whole."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normattn.errors import InputError
from normattn.lab.data import Tiling, TokenSplit, TrainingBatches
from normattn.lab.data.batches import MaskedBatches, Masking, below, uniforms
from normattn.lab.data.pairs import PairBatches, PairSplit
from normattn.lab.data.relations import RelationBatches, RelationSplit, padded
from normattn.lab.data.store import Ragged
from normattn.lab.data.windows import masked_set

from .helpers import make_split

SPLIT = make_split([700, 3, 1200, 900])
MASKING = Masking(vocab_size=3000)


# Text.


@settings(max_examples=40, deadline=None)
@given(
    world=st.integers(1, 6),
    share=st.integers(1, 4),
    step=st.integers(0, 2**40),
    seed=st.integers(0, 2**63 - 1),
)
def test_the_ranks_partition_the_global_batch(world: int, share: int, step: int, seed: int) -> None:
    batches = TrainingBatches(SPLIT, 16, world * share, seed, Tiling(0.4, 3, 9))
    whole = batches.batch(step)
    parts = [batches.batch(step, rank, world) for rank in range(world)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert whole.shape == (world * share, 17)
    assert whole.dtype == np.int64


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(6)))
def test_a_batch_does_not_depend_on_what_was_drawn_before(order: list[int]) -> None:
    first = TrainingBatches(SPLIT, 16, 4, 5)
    second = TrainingBatches(SPLIT, 16, 4, 5)
    drawn = {step: first.batch(step) for step in order}
    for step in range(6):
        np.testing.assert_array_equal(second.batch(step), drawn[step])


def test_rows_are_windows_of_the_packed_tokens_from_everywhere() -> None:
    batches = TrainingBatches(SPLIT, 16, 64, 0)
    packed = np.asarray(SPLIT.tokens).astype(np.int64)
    windows = {tuple(window) for window in np.lib.stride_tricks.sliding_window_view(packed, 17)}
    starts = set()
    crossed = False
    for step in range(200):
        for row in batches.batch(step).tolist():
            assert tuple(row) in windows
            starts.add(tuple(row))
            crossed |= 0 in row[1:-1]
    assert crossed
    assert len(starts) > 0.95 * len(windows)
    assert {tuple(packed[:17]), tuple(packed[-17:])} <= windows


def test_the_share_and_periods_of_tiled_rows() -> None:
    # Values count up, so a row's period is where its first token comes again.
    split = make_split([60_000])
    batches = TrainingBatches(split, 64, 256, 1, Tiling(0.3, 8, 32))
    rows = np.concatenate([batches.batch(step) for step in range(40)])
    periods = []
    for row in rows:
        again = np.flatnonzero(row[1:] == row[0])
        if len(again):
            period = int(again[0]) + 1
            np.testing.assert_array_equal(row, np.resize(row[:period], 65))
            np.testing.assert_array_equal(np.diff(row[:period]), 1)
            periods.append(period)
    assert abs(len(periods) / len(rows) - 0.3) < 0.015
    assert set(periods) == set(range(8, 33))
    counts = np.bincount(periods)[8:]
    assert counts.max() < 1.7 * counts.min()


def test_the_drawn_numbers_are_those_of_every_numpy() -> None:
    # Fixed by the Philox algorithm, not by numpy's distributions: these may never change.
    expected = np.random.Philox(key=np.array([3, 4], dtype=np.uint64)).random_raw(4)
    found = uniforms(3, 4, 2, 2)
    np.testing.assert_array_equal(found.ravel(), [int(word) // 2**11 / 2**53 for word in expected])
    assert found[0, 0] == 0.9854694359165987
    edge = np.array([0.0, np.nextafter(1.0, 0.0)])
    np.testing.assert_array_equal(below(edge, 2**53), [0, 2**53 - 1])
    np.testing.assert_array_equal(below(edge, np.array([1, 5])), [0, 4])


@pytest.mark.parametrize(
    ("split", "length", "batch", "tiling", "message"),
    [
        (make_split([5, 5]), 12, 2, None, "test split is too small .* it has 12 tokens and 13 are"),
        (SPLIT, 0, 2, None, "length and batch size must be at least 1"),
        (SPLIT, 16, 2, (0.5, 8, 32), "tiled_high must be at most the length"),
    ],
)
def test_impossible_batches_are_refused(
    split: TokenSplit,
    length: int,
    batch: int,
    tiling: tuple[float, int, int] | None,
    message: str,
) -> None:
    with pytest.raises(InputError, match=message):
        TrainingBatches(split, length, batch, 0, tiling and Tiling(*tiling))


def test_a_batch_that_the_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(InputError, match="4 sequences does not divide into 3 shares"):
        TrainingBatches(SPLIT, 16, 4, 0).batch(0, 0, 3)
    with pytest.raises(InputError, match="share 2"):
        TrainingBatches(SPLIT, 16, 4, 0).batch(0, 2, 2)
    for wrong in ((1.2, 1, 2), (0.5, 0, 2), (0.5, 3, 2)):
        with pytest.raises(InputError, match="tiled"):
            Tiling(*wrong)


# Masked text.


@settings(max_examples=30, deadline=None)
@given(world=st.integers(1, 5), share=st.integers(1, 4), step=st.integers(0, 2**40))
def test_the_ranks_partition_the_masked_batch(world: int, share: int, step: int) -> None:
    made = MaskedBatches(TrainingBatches(SPLIT, 31, world * share, 3), MASKING)
    parts = [made.batch(step, rank, world) for rank in range(world)]
    for name, whole in made.batch(step)._asdict().items():
        np.testing.assert_array_equal(np.concatenate([getattr(p, name) for p in parts]), whole)


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
    masking = Masking(vocab_size=500, share=share)
    rows = masking.rows(tokens, seed)
    chosen = max(1, round(share * length))
    assert rows.places.shape == rows.targets.shape == (6, chosen)
    assert (np.diff(rows.places, axis=1) > 0).all()
    again = rows.ids.copy()
    np.put_along_axis(again, rows.places, rows.targets, 1)
    np.testing.assert_array_equal(again, tokens)
    assert (rows.ids <= masking.mask_id).all()
    left = length - min(separators, length)
    assert ((rows.targets == 0).sum(1) == max(0, chosen - left)).all()


def test_the_shares_are_those_of_the_source() -> None:
    tokens = np.tile(np.arange(1, 101, dtype=np.int64), (4000, 1))
    masking = Masking(vocab_size=101)
    rows = masking.rows(tokens, 7)
    shown = np.take_along_axis(rows.ids, rows.places, 1)
    masked, kept = shown == masking.mask_id, shown == rows.targets
    assert shown.size == 4000 * 15
    assert abs(masked.mean() - 0.8) < 0.006
    # A token drawn at random is the right one in one of a hundred cases.
    assert abs(kept.mean() - (0.1 + 0.1 / 100)) < 0.005
    others = np.bincount(shown[~masked & ~kept], minlength=102)[1:101]
    assert others.min() > 0
    assert (shown > 0).all()
    # Every position is chosen equally often: the standard error is 0.0056.
    assert abs(np.bincount(rows.places.ravel(), minlength=100) / 4000 - 0.15).max() < 0.03


def test_held_out_texts_are_hidden_once() -> None:
    texts = masked_set(SPLIT, 20, MASKING, max_windows=12, seed=4)
    assert len(texts) == 12
    assert texts.rows.ids.shape == (12, 20)
    assert texts.rows.places.shape == (12, 3)
    again = texts.rows.ids.copy()
    np.put_along_axis(again, texts.rows.places, texts.rows.targets, 1)
    # Token values count up inside a document.
    np.testing.assert_array_equal(np.diff(again, axis=1), 1)
    assert texts.fingerprint == masked_set(SPLIT, 20, MASKING, 12, 4).fingerprint
    others = {masked_set(SPLIT, 20, MASKING, 12, seed).fingerprint for seed in range(5)}
    assert len(others) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"share": 0.0}, "above 0"),
        ({"share": 1.5}, "up to 1"),
        ({"masked": 0.8, "random": 0.3}, "at most 1 together"),
        ({"vocab_size": 1}, "at least 2"),
    ],
)
def test_impossible_masks_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Masking(**{"vocab_size": 300, **changes})  # type: ignore[arg-type]


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
                    number = int(source[0]) - 3
                    wide, high = lengths[number]
                    assert source.tolist() == [number + 3] * wide + [2] + [0] * (width - wide - 1)
                    if target[1] == 0:  # fills the batch up
                        assert target.tolist() == [1] + [0] * height
                        continue
                    seen[number] += 1
                    assert target.tolist() == (
                        [1] + [number + 3] * high + [2] + [0] * (height - high - 1)
                    )
        assert seen == Counter(range(len(lengths)))


def test_a_batch_of_pairs_is_a_function_of_seed_and_step() -> None:
    made = pair_split([(1 + n % 13, 1 + n % 7) for n in range(200)])
    batches, others = PairBatches(made, 600, 3), PairBatches(made, 600, 3)
    length = len(batches)
    later = {step: others.batch(step).source for step in (3 * length, 2, length)}
    for step, expected in later.items():
        np.testing.assert_array_equal(batches.batch(step).source, expected)

    def epoch(seed: int, number: int) -> list[bytes]:
        steps = range(number * length + 1, (number + 1) * length + 1)
        return [PairBatches(made, 600, seed).batch(step).source.tobytes() for step in steps]

    assert len({tuple(epoch(*which)) for which in ((3, 0), (4, 0), (3, 1))}) == 3
    with pytest.raises(InputError, match=r"make 512 tokens, more than batch_tokens \(500\)"):
        PairBatches(pair_split([(30, 30)]), 500, 0)
    with pytest.raises(InputError, match="not by 3"):
        PairBatches(pair_split([(3, 3)]), 500, 0).batch(1, 0, 3)


# Documents with labels.


def relation_split(lengths: list[int]) -> RelationSplit:
    """Document i is made of the token i + 1 alone and has label i mod 3."""
    tokens = [[i + 1] * length for i, length in enumerate(lengths)]
    labels = [[i % 3] for i in range(len(lengths))]
    return RelationSplit("train", tokens, labels, [f"d{i}" for i in range(len(lengths))], 0)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=4, max_size=40), st.integers(1, 4), st.integers(0, 99))
def test_an_epoch_holds_every_document_at_most_once(
    lengths: list[int], batch_size: int, seed: int
) -> None:
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


def test_a_batch_of_documents_depends_on_seed_and_step_alone() -> None:
    split = relation_split([1 + i % 5 for i in range(50)])
    one, other = (RelationBatches(split, 3, 0, 8, seed=4) for _ in range(2))
    for step in (9, 2, 30):
        other.batch(step + 1)
        assert (one.batch(step).ids == other.batch(step).ids).all()
    epochs = [{tuple(one.batch(e * 6 + s).ids[:, 0]) for s in range(1, 7)} for e in range(2)]
    assert epochs[0] != epochs[1]
    reseeded = RelationBatches(split, 3, 0, 8, seed=5).batch(1).ids[:, 0]
    assert reseeded.tolist() != one.batch(1).ids[:, 0].tolist()
    ids, padding = padded([[5], [6, 7]], 9, length=3)
    assert ids.tolist() == [[5, 9, 9], [6, 7, 9]]
    assert padding.tolist() == [[False, True, True], [False, False, True]]


def test_shares_of_documents_make_up_the_batch_and_have_its_length() -> None:
    batches = RelationBatches(relation_split([1 + i % 7 for i in range(40)]), 3, 0, 8, seed=0)
    whole = batches.batch(3)
    parts = [batches.batch(3, share, 4) for share in range(4)]
    assert {part.ids.shape for part in parts} == {(2, whole.ids.shape[1])}
    together = np.concatenate([part.ids for part in parts])
    assert sorted(map(tuple, together.tolist())) == sorted(map(tuple, whole.ids.tolist()))
    for share, shares in ((0, 3), (4, 4), (-1, 2)):
        with pytest.raises(InputError, match=f"does not divide into {shares} shares"):
            batches.batch(1, share, shares)

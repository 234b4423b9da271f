"""Training batches: a pure function of (seed, step), shared by ranks without a gap."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normattn.errors import InputError
from normattn.lab.data import Tiling, TokenSplit, TrainingBatches
from normattn.lab.data.batches import below, uniforms

from .helpers import make_split

SPLIT = make_split([700, 3, 1200, 900])


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
    assert found[0, 0] == GOLDEN_UNIFORM
    edge = np.array([0.0, np.nextafter(1.0, 0.0)])
    np.testing.assert_array_equal(below(edge, 2**53), [0, 2**53 - 1])
    np.testing.assert_array_equal(below(edge, np.array([1, 5])), [0, 4])


GOLDEN_UNIFORM = 0.9854694359165987


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

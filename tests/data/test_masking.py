"""Masking: a pure function of (seed, step, row) with BERT's shares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normattn.errors import InputError
from normattn.lab.data import TrainingBatches
from normattn.lab.data.batches import MaskedBatches, Masking
from normattn.lab.data.windows import masked_set

from .helpers import make_split

SPLIT = make_split([700, 3, 1200, 900])
MASKING = Masking(vocab_size=3000)


def batches(world: int = 1, share: int = 8, seed: int = 3) -> MaskedBatches:
    return MaskedBatches(TrainingBatches(SPLIT, 31, world * share, seed), MASKING)


@settings(max_examples=30, deadline=None)
@given(world=st.integers(1, 5), share=st.integers(1, 4), step=st.integers(0, 2**40))
def test_the_ranks_partition_the_masked_batch(world: int, share: int, step: int) -> None:
    made = batches(world, share)
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
    ("settings", "message"),
    [
        ({"share": 0.0}, "above 0"),
        ({"share": 1.5}, "up to 1"),
        ({"masked": 0.8, "random": 0.3}, "at most 1 together"),
        ({"vocab_size": 1}, "at least 2"),
    ],
)
def test_impossible_masks_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Masking(**{"vocab_size": 300, **settings})  # type: ignore[arg-type]

"""Batches of documents: every document once an epoch, any number of shares, no state."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normattn.errors import InputError
from normattn.lab.data.relations import RelationBatches, RelationSplit, padded


def make_split(lengths: list[int]) -> RelationSplit:
    """Document i is made of the token i + 1 alone and has label i mod 3."""
    tokens = [[i + 1] * length for i, length in enumerate(lengths)]
    labels = [[i % 3] for i in range(len(lengths))]
    return RelationSplit("train", tokens, labels, [f"d{i}" for i in range(len(lengths))], 0)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=4, max_size=40), st.integers(1, 4), st.integers(0, 99))
def test_an_epoch_holds_every_document_at_most_once(
    lengths: list[int], batch_size: int, seed: int
) -> None:
    batches = RelationBatches(make_split(lengths), 3, 0, batch_size, seed)
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


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    split = make_split([1 + i % 5 for i in range(50)])
    one, other = (RelationBatches(split, 3, 0, 8, seed=4) for _ in range(2))
    for step in (9, 2, 30):
        other.batch(step + 1)
        assert (one.batch(step).ids == other.batch(step).ids).all()
    epochs = [{tuple(one.batch(e * 6 + s).ids[:, 0]) for s in range(1, 7)} for e in range(2)]
    assert epochs[0] != epochs[1]
    assert (RelationBatches(split, 3, 0, 8, seed=5).batch(1).ids[:, 0]).tolist() != (
        one.batch(1).ids[:, 0].tolist()
    )


def test_shares_make_up_the_batch_and_have_its_length() -> None:
    batches = RelationBatches(make_split([1 + i % 7 for i in range(40)]), 3, 0, 8, seed=0)
    whole = batches.batch(3)
    parts = [batches.batch(3, share, 4) for share in range(4)]
    assert {part.ids.shape for part in parts} == {(2, whole.ids.shape[1])}
    together = np.concatenate([part.ids for part in parts])
    assert sorted(map(tuple, together.tolist())) == sorted(map(tuple, whole.ids.tolist()))
    for share, shares in ((0, 3), (4, 4), (-1, 2)):
        with pytest.raises(InputError, match=f"does not divide into {shares} shares"):
            batches.batch(1, share, shares)


def test_rows_are_padded_on_the_right() -> None:
    ids, padding = padded([[5], [6, 7]], 9, length=3)
    assert ids.tolist() == [[5, 9, 9], [6, 7, 9]]
    assert padding.tolist() == [[False, True, True], [False, False, True]]

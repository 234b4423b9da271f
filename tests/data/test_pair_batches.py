"""Batches by tokens: stateless, bounded, in equal shares, every sentence once an epoch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normattn.errors import InputError
from normattn.lab.data.pairs import PairBatches, PairSplit
from normattn.lab.data.store import Ragged


def split(lengths: list[tuple[int, int]]) -> PairSplit:
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
    batches = PairBatches(split(lengths), tokens, seed)
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


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    made = split([(1 + n % 13, 1 + n % 7) for n in range(200)])
    batches, others = PairBatches(made, 600, 3), PairBatches(made, 600, 3)
    length = len(batches)
    later = [others.batch(step).source for step in (3 * length, 2, length)]
    for step, expected in zip((3 * length, 2, length), later, strict=True):
        np.testing.assert_array_equal(batches.batch(step).source, expected)
    one = [PairBatches(made, 600, 3).batch(step).source for step in range(1, length + 1)]
    other = [PairBatches(made, 600, 4).batch(step).source for step in range(1, length + 1)]
    again = [batches.batch(length + step).source for step in range(1, length + 1)]
    for different in (other, again):
        assert any(
            a.shape != b.shape or (a != b).any() for a, b in zip(one, different, strict=True)
        )


def test_bad_input() -> None:
    with pytest.raises(InputError, match=r"make 512 tokens, more than batch_tokens \(500\)"):
        PairBatches(split([(30, 30)]), 500, 0)
    with pytest.raises(InputError, match="not by 3"):
        PairBatches(split([(3, 3)]), 500, 0).batch(1, 0, 3)

"""Documents of a packed row, from position ids and from cumulative lengths."""

from __future__ import annotations

import pytest
import torch

from normattn import InputError
from normattn.layers import documents_from_lengths, documents_from_positions


def test_both_give_the_documents_of_a_row() -> None:
    expected = torch.tensor([[0, 0, 0, 1, 2, 2]])
    assert torch.equal(documents_from_positions(torch.tensor([[0, 1, 2, 0, 0, 1]])), expected)
    assert torch.equal(documents_from_lengths(torch.tensor([0, 3, 4, 6])), expected)
    rows = torch.tensor([[0, 1, 2, 3], [5, 6, 0, 1]])
    assert documents_from_positions(rows).tolist() == [[0, 0, 0, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize("wrong", [[1, 3], [0], [0, 3, 3]])
def test_lengths_that_are_none_are_refused(wrong: list[int]) -> None:
    with pytest.raises(InputError, match="cu_seqlens must start with 0"):
        documents_from_lengths(torch.tensor(wrong))

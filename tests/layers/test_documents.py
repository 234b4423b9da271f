"""Documents of a packed row, from position ids and from cumulative lengths."""

from __future__ import annotations

import pytest
import torch

from normattn import InputError, attention
from normattn.layers import documents_from_lengths, documents_from_positions


def test_both_give_the_documents_of_a_row() -> None:
    expected = torch.tensor([[0, 0, 0, 1, 2, 2]])
    assert torch.equal(documents_from_positions(torch.tensor([[0, 1, 2, 0, 0, 1]])), expected)
    assert torch.equal(documents_from_lengths(torch.tensor([0, 3, 4, 6])), expected)
    rows = torch.tensor([[0, 1, 2, 3], [5, 6, 0, 1]])
    assert documents_from_positions(rows).tolist() == [[0, 0, 0, 0], [0, 0, 1, 1]]


def test_a_packed_row_is_read_as_its_documents_apart() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 4, dtype=torch.float64) for _ in range(3))
    documents = documents_from_lengths(torch.tensor([0, 3, 6]))
    packed = attention(q, k, v, "KNA-Packed", documents=documents)
    first, second = (
        attention(q[:, :, rows], k[:, :, rows], v[:, :, rows], "KNA")
        for rows in (slice(3), slice(3, 6))
    )
    torch.testing.assert_close(packed, torch.cat((first, second), 2))


@pytest.mark.parametrize("wrong", [[1, 3], [0], [0, 3, 3]])
def test_lengths_that_are_none_are_refused(wrong: list[int]) -> None:
    with pytest.raises(InputError, match="cu_seqlens must begin with 0"):
        documents_from_lengths(torch.tensor(wrong))

"""`Packed`: documents are runs of a number; each reads as if it stood alone, whatever is numbered.

The oracle is attention over each document's real tokens by themselves.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from normattn import InputError, attention
from normattn.kernels import BACKENDS
from normattn.layers import documents_from_lengths, documents_from_positions
from score.cases import tensors

D = 8
NUMBERS = {
    "a number that comes back": ([0, 0, 1, 1, 1, 0, 0, 0, 0], []),
    "falling numbers": ([3, 3, 1, 1, 2, 2, 1, 1, 1], []),
    "padding inside a document": ([0, 0, 0, 0, 0, 0, 1, 1, 1], [2, 3]),
    "padding inside, before and after": ([0, 0, 0, 1, 1, 1, 0, 0, 0], [0, 2, 4, 8]),
    "padding of another number": ([0, 0, 7, 7, 0, 0, 1, 1, 1], [2, 3]),
}
SCORES = ("Baseline", "KNA-logn@4", "Baseline-ALiBi", "Baseline-ReRoPE(window=2)@4")
BY_NAME = tuple(name for name in BACKENDS if name in ("auto", "chunked", "reference"))


def _packed(score: str) -> str:
    name, at, length = score.partition("@")
    return f"{name}-Packed{at}{length}"


def _runs(numbers: list[int], padded: list[int]) -> list[list[int]]:
    """The places of each document's real tokens."""
    runs: list[list[int]] = []
    before = None
    for place, number in enumerate(numbers):
        if place in padded:
            continue
        if number != before:
            runs.append([])
        runs[-1].append(place)
        before = number
    return runs


def _alone(
    score: str, q: Tensor, k: Tensor, v: Tensor, runs: list[list[int]], causal: bool
) -> Tensor:
    out = torch.zeros_like(q)
    for run in runs:
        a, b, c = (x[:, :, run] for x in (q, k, v))
        out[:, :, run] = attention(a, b, c, score, causal, backend="reference")
    return out


def _inputs(padded: list[int]) -> tuple[list[Tensor], Tensor]:
    qkv = [x.detach() for x in tensors((1, 2, 9, D), (1, 1, 9, D), (1, 1, 9, D))]
    padding = torch.zeros(1, 9, dtype=torch.bool)
    padding[:, padded] = True
    return qkv, padding


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("case", NUMBERS)
def test_each_document_reads_as_if_alone(case: str, score: str, causal: bool) -> None:
    if not causal and "ReRoPE" in score:
        pytest.skip("two regimes are causal")
    numbers, padded = NUMBERS[case]
    (q, k, v), padding = _inputs(padded)
    documents = torch.tensor([numbers])
    runs = _runs(numbers, padded)
    expected = _alone(score, q, k, v, runs, causal)
    real = [place for run in runs for place in run]
    name = _packed(score)
    given = padding if padded else None
    for backend in BY_NAME:
        out = attention(
            q, k, v, name, causal, key_padding=given, documents=documents, backend=backend
        )
        torch.testing.assert_close(out[:, :, real], expected[:, :, real])


def test_positions_that_begin_anew_are_documents_by_name_only() -> None:
    """Without them they are refused; padding, any order and equal neighbours are no restart."""
    at = torch.tensor([0, 1, 2, 0, 1, 2])
    q, k, v = (x.detach() for x in tensors((1, 2, 6, D), (1, 1, 6, D), (1, 1, 6, D)))

    def read(score: str, **more: Any) -> Tensor:
        out: Tensor = attention(q, k, v, score, q_positions=at, k_positions=at, **more)
        return out

    with pytest.raises(InputError, match="Packed"):
        read("KNA")
    packed = read("KNA-Packed", documents=torch.tensor([[0, 0, 0, 1, 1, 1]]))
    expected = _alone("KNA", q, k, v, [[0, 1, 2], [3, 4, 5]], True)
    torch.testing.assert_close(packed, expected, rtol=1e-9, atol=1e-9)
    padding = torch.tensor([[True, True, True, False, False, False]])
    left = read("KNA", key_padding=padding)
    torch.testing.assert_close(left[:, :, 3:], expected[:, :, 3:], rtol=1e-9, atol=1e-9)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    qkv = q[:, :, order], k[:, :, order], v[:, :, order]
    mixed = attention(*qkv, "KNA", q_positions=order, k_positions=order)
    whole = attention(q, k, v, "KNA")
    torch.testing.assert_close(mixed, whole[:, :, order], rtol=1e-9, atol=1e-9)
    attention(q, k, v, "KNA", k_positions=torch.tensor([0, 1, 1, 1, 2, 3]))


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

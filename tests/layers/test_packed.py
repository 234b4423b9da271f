"""`Packed`: documents are runs of a number; each reads as if it stood alone, however numbered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from normattn import InputError, attention
from normattn.layers import documents_from_lengths, documents_from_positions
from score import oracle
from score.cases import tensors
from score.recipe import Recipe

D = 8
# A number that comes back, falling ones, padding inside a document, and before and after it, and
# padding of another number.
NUMBERS = [
    *([0, 0, 1, 1, 1, 0, 0, 0, 0], [3, 3, 1, 1, 2, 2, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1, 1]),
    *([0, 0, 0, 1, 1, 1, 0, 0, 0], [0, 0, 7, 7, 0, 0, 1, 1, 1]),
]
PADDED = [[], [], [2, 3], [0, 2, 4, 8], [2, 3]]
RECIPES = [
    Recipe("Baseline", packed=True),
    Recipe("KNA", "logn", train_length=4, packed=True),
    Recipe("Baseline", "", "none", bias="ALiBi", packed=True),
    Recipe("Baseline", method="ReRoPE", window=2, packed=True),
]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.text for recipe in RECIPES])
def test_each_document_reads_as_if_alone(recipe: Recipe, causal: bool) -> None:
    if not causal and recipe.needs_causal:
        pytest.skip("two regimes are causal")
    q, k, v = (x.detach() for x in tensors((5, 2, 9, D), (5, 1, 9, D), (5, 1, 9, D)))
    documents, padding = torch.tensor(NUMBERS), torch.zeros(5, 9, dtype=torch.bool)
    for row, places in enumerate(PADDED):
        padding[row, places] = True
    for given in (padding, None):
        expected = oracle.attend(recipe, q, k, v, causal=causal, padding=given, documents=documents)
        real = ~(torch.zeros_like(padding) if given is None else given)[:, None, :, None]
        for backend in ("auto", "chunked", "reference"):
            how: Any = {"key_padding": given, "documents": documents, "backend": backend}
            out = attention(q, k, v, recipe.text, causal, **how)
            torch.testing.assert_close(out * real, expected * real)


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
    halves = [(q[:, :, x], k[:, :, x], v[:, :, x]) for x in (slice(0, 3), slice(3, 6))]
    expected = torch.cat([attention(a, b, c, "KNA", backend="reference") for a, b, c in halves], 2)
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

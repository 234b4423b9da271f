"""Normalisers beside softmax: limits, positions in any order, caches, what an observer is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from normattn import InputError, Score, ScoreSpec, attention, explain
from normattn.kernels.stats import Observation, observing
from normattn.layers.attention import attention_cached
from normattn.layers.cache import KeyValueCache
from score.cases import NORMALISERS, built, normalised, tensors

B, H, T, D = 2, 2, 11, 8
SHAPES = (B, H, T, D), (B, 1, T, D), (B, 1, T, D)


def _weights(q: Tensor, k: Tensor, score: str) -> Tensor:
    values = torch.eye(T, dtype=q.dtype).expand(q.shape[0], k.shape[1], T, T)
    return attention(q, k, values, score)


def test_a_stick_is_never_used_up_and_the_current_token_breaks_first() -> None:
    q, k, _ = tensors(*SHAPES)
    weight = _weights(q, k, "Baseline-NoPE-StickBreaking")
    assert (weight.sum(-1) < 1).all()
    assert (weight[:, :, 0] == 0).all()
    assert (weight.diagonal(dim1=-2, dim2=-1) == 0).all()
    own = _weights(q, k, "Baseline-NoPE-StickBreaking(current=true)").diagonal(dim1=-2, dim2=-1)
    score = (q * k).sum(-1) / D**0.5
    torch.testing.assert_close(own, score.sigmoid())


def test_sigmoids_of_nothing_add_up_to_one_at_the_training_length() -> None:
    q = torch.zeros(1, 1, T, D, dtype=torch.float64)
    weight = _weights(q, q, f"Baseline-Sigmoid@{T}")
    torch.testing.assert_close(weight[0, 0, -1].sum(), torch.tensor(T / (T + 1)).double())
    assert str(ScoreSpec.parse("KNA-Sigmoid@32")) == "KNA-Sigmoid(tokens=32)@32"


def test_keys_in_any_order_are_broken_off_by_position() -> None:
    q, k, v = tensors(*SHAPES)
    order = torch.randperm(T, generator=torch.Generator().manual_seed(3))
    whole = attention(q, k, v, "KNA-StickBreaking")
    mixed = attention(
        q[:, :, order],
        k[:, :, order],
        v[:, :, order],
        "KNA-StickBreaking",
        q_positions=order,
        k_positions=order,
    )
    torch.testing.assert_close(mixed, whole[:, :, order])


@torch.no_grad()
@pytest.mark.parametrize("recipe", list(normalised()), ids=lambda recipe: recipe.text)
def test_a_cache_reads_as_the_whole(recipe: Any) -> None:
    q, k, v = tensors(*SHAPES)
    score, cache, pieces, first = built(recipe, H, D, 1), KeyValueCache(), [], 0
    for size in (1, 3, 1, 5, 1):
        new = slice(first, first + size)
        pieces.append(attention_cached(q[:, :, new], k[:, :, new], v[:, :, new], score, cache))
        first += size
    torch.testing.assert_close(torch.cat(pieces, 2), attention(q, k, v, score))


def test_half_precision_keeps_the_sum_over_many_keys() -> None:
    """1000 shares of about 0.007: in bfloat16 a sum of their logarithms would stand still."""
    q, k, v = (x.detach() for x in tensors((1, 1, 1000, 8), (1, 1, 1000, 8), (1, 1, 1000, 8)))
    low_q, low_k, low_v = (3 * q - 4).bfloat16(), k.abs().bfloat16(), v.bfloat16()
    half = attention(low_q, low_k, low_v, "Baseline-NoPE-StickBreaking")
    exact = attention(low_q.double(), low_k.double(), low_v.double(), "Baseline-NoPE-StickBreaking")
    assert (half.double() - exact).abs().max() < 0.03


class _Notes:
    def __init__(self) -> None:
        self.seen: list[Observation] = []

    def enter(self, *given: Any) -> None: ...

    def confine(self, *given: Any) -> None: ...

    def functions(self, problem: Any) -> None: ...

    def see(self, problem: Any, observation: Observation) -> None:
        self.seen.append(observation)


@pytest.mark.parametrize("name", [name for name in NORMALISERS if name != "Selective"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_an_observer_is_told_the_largest_logit_and_the_entropy_of_shares(
    name: str, backend: str
) -> None:
    q, k, v = tensors(*SHAPES)
    notes = _Notes()
    score = Score(f"Baseline-NoPE-{name}@8", H, D, 1).double()
    with observing(notes):
        attention(q, k, v, score, backend=backend)
    (told,) = notes.seen
    logits = (q @ k.transpose(-1, -2) / D**0.5).tril() + torch.full((T, T), -torch.inf).triu(1)
    torch.testing.assert_close(told.largest, logits.amax(-1))
    weight = _weights(q, k, f"Baseline-NoPE-{name}@8")
    share = weight / weight.sum(-1, keepdim=True).clamp(min=1e-300)
    torch.testing.assert_close(told.entropy, torch.special.entr(share).sum(-1))


def test_what_cannot_be_asked_and_what_explain_says() -> None:
    q, k, v = tensors(*SHAPES)
    with pytest.raises(InputError, match="needs tokens="):
        attention(q, k, v, "Baseline-Sigmoid")
    with pytest.raises(InputError, match="StickBreaking is defined for causal attention only"):
        attention(q, k, v, "Baseline-StickBreaking", causal=False)
    with pytest.raises(InputError, match=r"fused kernel cannot serve this: .*a normaliser"):
        attention(q, k, v, "Baseline-StickBreaking", backend="fused")
    told = explain("KNA-Sigmoid@64", (1, 2, 64, 8))
    assert told.kernel == "strips"
    assert any("Sigmoid" in line for line in told.left)

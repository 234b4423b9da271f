"""Which tokens can come, how often each does, and whose numbers decide it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from normattn.errors import InputError
from normattn.models.generation import Sampling, row_generators

PROBABILITIES = torch.tensor([[0.1, 0.4, 0.05, 0.2, 0.25]], dtype=torch.float64)
LOGITS = PROBABILITIES.log() + 3


def _support(sampling: Sampling, logits: Tensor = LOGITS) -> dict[int, float]:
    chance, tokens = sampling.probabilities(logits)
    pairs = zip(tokens[0].tolist(), chance[0].tolist(), strict=True)
    return {token: p for token, p in sorted(pairs) if p > 0}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {0: 0.1, 1: 0.4, 2: 0.05, 3: 0.2, 4: 0.25}),
        ({"top_k": 2}, {1: 0.4 / 0.65, 4: 0.25 / 0.65}),
        ({"top_k": 99}, {0: 0.1, 1: 0.4, 2: 0.05, 3: 0.2, 4: 0.25}),
        ({"top_p": 0.4}, {1: 1.0}),
        ({"top_p": 0.41}, {1: 0.4 / 0.65, 4: 0.25 / 0.65}),
        ({"top_p": 0.84}, {1: 0.4 / 0.85, 3: 0.2 / 0.85, 4: 0.25 / 0.85}),
        ({"top_p": 1.0}, {0: 0.1, 1: 0.4, 2: 0.05, 3: 0.2, 4: 0.25}),
        ({"top_p": 1e-9}, {1: 1.0}),
        # Of the two likeliest, renormalised to 0.615 and 0.385, one is a nucleus of 0.6.
        ({"top_k": 2, "top_p": 0.6}, {1: 1.0}),
    ],
)
def test_what_can_come(settings: dict[str, Any], expected: dict[int, float]) -> None:
    assert _support(Sampling(1.0, **settings)) == pytest.approx(expected)


def test_equally_likely_tokens_are_ordered_by_their_id() -> None:
    assert _support(Sampling(1.0, top_k=2), torch.zeros(1, 5)) == {0: 0.5, 1: 0.5}
    assert Sampling().next_tokens(torch.zeros(1, 5), row_generators(0, 1)) == [0]


def test_tokens_come_as_often_as_they_should() -> None:
    rows = 4000
    drawn = Sampling(1.0, top_p=0.9).next_tokens(LOGITS.expand(rows, -1), row_generators(5, rows))
    shares = torch.bincount(torch.tensor(drawn), minlength=5) / rows
    wanted = torch.tensor([0.1, 0.4, 0.0, 0.2, 0.25]) / 0.95
    # Four standard deviations of a share; what is left out never comes.
    assert ((shares - wanted).abs() <= 4 * (wanted * (1 - wanted) / rows).sqrt()).all()


def test_a_row_draws_with_its_own_numbers() -> None:
    sampling, logits = Sampling(1.0), torch.zeros(3, 1000)
    together = sampling.next_tokens(logits, row_generators(7, 3))
    assert together == sampling.next_tokens(logits, row_generators(7, 3))
    assert together == sampling.next_tokens(logits, row_generators([7, 8, 9], 3))
    assert together[1:2] == sampling.next_tokens(logits[:1], row_generators(8, 1))
    assert len(set(together)) == 3


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": -1.0}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1.0, "top_k": 0}, "top_k is 0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p is 0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": 3}, "temperature 0 always takes the likeliest"),
        ({"top_p": 0.5}, "temperature 0 always takes the likeliest"),
    ],
)
def test_what_is_out_of_range(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Sampling(**values)


def test_seeds_and_logits_that_cannot_be() -> None:
    with pytest.raises(InputError, match="2 seeds were given for 3 prompts"):
        row_generators([1, 2], 3)
    with pytest.raises(InputError, match="at least 0"):
        row_generators(-1, 1)
    with pytest.raises(InputError, match="not finite"):
        Sampling().next_tokens(torch.tensor([[0.0, float("nan")]]), row_generators(0, 1))

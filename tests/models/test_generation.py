"""`generate`: each row by itself; which tokens can come, and how often each does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from normattn.errors import InputError
from normattn.models.causal_lm import CausalLM
from normattn.models.config import CausalLMConfig
from normattn.models.generation import Answer, Sampling, generate, row_generators

VOCABULARY = 29
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [8, 4]]
LOGITS = torch.tensor([[0.1, 0.4, 0.05, 0.2, 0.25]], dtype=torch.float64).log() + 3


def _model() -> CausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"dim": 16, "layers": 2, "heads": 2, "train_length": 6}
    sizes["score"] = "KNA-logn"
    config = CausalLMConfig(vocab_size=VOCABULARY, **sizes, tie_head=False, init_std=1.0)
    return CausalLM(config).double().eval()


MODEL = _model()


@torch.no_grad()
def _greedily(model: CausalLM, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """The definition: read everything again for every token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


def _decode(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token) if token < 26 else "é" for token in tokens)


@pytest.mark.parametrize("method", ["", "DynamicNTK", "ReRoPE(window=3)", "StreamingLLM(window=4)"])
def test_greedy_answers_are_those_of_reading_everything_again(method: str) -> None:
    with MODEL.using(method):
        answers = MODEL.generate(PROMPTS[1:3], 4, chunk=3)
        for prompt, answer in zip(PROMPTS[1:3], answers, strict=True):
            assert answer == Answer(_greedily(MODEL, prompt, 4), "length")


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.3, "top_p": 0.95, "top_k": 20}])
def test_a_row_is_independent_of_its_neighbours_and_of_earlier_calls(
    settings: dict[str, Any],
) -> None:
    with MODEL.using("DynamicNTK"):
        together = generate(MODEL, PROMPTS, 8, seed=11, **settings)
        again = generate(MODEL, PROMPTS[::-1], 8, seed=[14, 13, 12, 11], **settings)
        assert again[::-1] == together
        for row, prompt in enumerate(PROMPTS):
            assert generate(MODEL, [prompt], 8, seed=11 + row, **settings) == [together[row]]
    if settings:
        assert generate(MODEL, PROMPTS, 8, seed=12, **settings) != together


def test_rows_stop_by_themselves() -> None:
    whole = generate(MODEL, PROMPTS, 12)
    stop = whole[2].tokens[4]
    for answer, long in zip(generate(MODEL, PROMPTS, 12, stop=[stop]), whole, strict=True):
        end = long.tokens.index(stop) if stop in long.tokens else None
        assert answer.tokens == long.tokens[:end]
        assert answer.ended == ("length" if end is None else "stop")
    for same in (np.int64(stop), torch.tensor(stop)):
        assert generate(MODEL, PROMPTS, 12, stop=[same])[2].ended == "stop"


def test_a_stop_string_ends_the_text_and_may_span_tokens() -> None:
    [whole] = generate(MODEL, PROMPTS[:1], 12, decode=_decode)
    text = _decode(whole.tokens)
    assert whole.text == text
    stop = text[5:8]
    [answer] = generate(MODEL, PROMPTS[:1], 12, stop=[stop, "zzzz"], decode=_decode)
    first = text.index(stop)
    assert answer == Answer(whole.tokens[: first + 3], "stop", text[:first])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {0: 0.1, 1: 0.4, 2: 0.05, 3: 0.2, 4: 0.25}),
        ({"top_k": 2}, {1: 0.4 / 0.65, 4: 0.25 / 0.65}),
        ({"top_p": 0.4}, {1: 1.0}),
        ({"top_p": 0.41}, {1: 0.4 / 0.65, 4: 0.25 / 0.65}),
        ({"top_p": 0.84, "top_k": 99}, {1: 0.4 / 0.85, 3: 0.2 / 0.85, 4: 0.25 / 0.85}),
        ({"top_p": 1e-9}, {1: 1.0}),
        # Of the two likeliest, renormalised to 0.615 and 0.385, one is a nucleus of 0.6.
        ({"top_k": 2, "top_p": 0.6}, {1: 1.0}),
    ],
)
def test_what_can_come(settings: dict[str, Any], expected: dict[int, float]) -> None:
    def support(sampling: Sampling, logits: Tensor) -> dict[int, float]:
        chance, tokens = sampling.probabilities(logits)
        pairs = zip(tokens[0].tolist(), chance[0].tolist(), strict=True)
        return {token: p for token, p in pairs if p > 0}

    assert support(Sampling(1.0, **settings), LOGITS) == pytest.approx(expected)
    # Equally likely tokens are ordered by their id.
    assert support(Sampling(1.0, top_k=2), torch.zeros(1, 5)) == {0: 0.5, 1: 0.5}
    assert Sampling().next_tokens(torch.zeros(1, 5), row_generators(0, 1)) == [0]


def test_tokens_come_as_often_as_they_should_by_the_row_s_own_numbers() -> None:
    rows, sampling = 4000, Sampling(1.0, top_p=0.9)
    drawn = sampling.next_tokens(LOGITS.expand(rows, -1), row_generators(5, rows))
    shares = torch.bincount(torch.tensor(drawn), minlength=5) / rows
    wanted = torch.tensor([0.1, 0.4, 0.0, 0.2, 0.25]) / 0.95
    # Four standard deviations of a share; what is left out never comes.
    assert ((shares - wanted).abs() <= 4 * (wanted * (1 - wanted) / rows).sqrt()).all()
    assert drawn[1:2] == sampling.next_tokens(LOGITS, row_generators(6, 1))
    assert drawn[:3] == sampling.next_tokens(LOGITS.expand(3, -1), row_generators([5, 6, 7], 3))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prompts": [[1], []]}, "prompt 1 is not a list of token ids, .* one at least"),
        ({"prompts": []}, "there is no prompt"),
        ({"prompts": [[1, 29]]}, "vocabulary is 0 to 28"),
        ({"prompts": [[1.5]]}, "prompt 0 is not a list of token ids"),
        ({"prompts": "words"}, "prompt 0 is not a list of token ids"),
        ({"prompts": [[1], [[2]]]}, "prompt 1 is not a list of token ids"),
        ({"prompts": 3}, "prompts must be lists"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, but it is 0"),
        ({"stop": [29]}, "of the vocabulary 0 … 28, not 29"),
        ({"stop": [""]}, "stop string is empty"),
        ({"stop": ["a"]}, "need decode"),
        ({"stop": [True]}, "stop takes strings and token ids .* not True"),
        ({"stop": [torch.tensor([1, 2])]}, "stop takes strings and token ids"),
        ({"chunk": 0}, "chunk must be a whole number of at least 1"),
        ({"prompts": [[1], [2]], "seed": [1]}, "or 2 of them, not .1."),
        ({"seed": -1}, "seed must be a whole number from 0"),
        ({"seed": 1.5}, "seed must be a whole number"),
        ({"stop": 3}, "stop takes a list .* not 3"),
        ({"stop": "END", "decode": str}, "stop takes a list .* not 'END'"),
        ({"temperature": "warm"}, "temperature is 'warm'"),
        ({"temperature": 1.0, "top_p": "x"}, "top_p is 'x'"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1.0, "top_k": 0}, "top_k must be a whole number of at least 1"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p is 0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": 3}, "temperature 0"),
        ({"top_p": 0.5}, "temperature 0"),
    ],
)
def test_bad_input(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        generate(MODEL, **{"prompts": [[1]], "max_new_tokens": 2, **settings})


def test_logits_that_are_not_finite_are_refused() -> None:
    with pytest.raises(InputError, match="not finite"):
        Sampling().next_tokens(torch.tensor([[0.0, float("nan")]]), row_generators(0, 1))

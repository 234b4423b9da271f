"""`generate`: each row by itself, whatever stands beside it and whatever was read before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from normattn.errors import InputError
from normattn.models.causal_lm import CausalLM
from normattn.models.config import CausalLMConfig
from normattn.models.generation import Answer, generate

VOCABULARY, L = 29, 6
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [8, 4]]


def _model(score: str = "KNA-logn", **changes: Any) -> CausalLM:
    torch.manual_seed(0)
    config = CausalLMConfig(
        vocab_size=VOCABULARY,
        **{"dim": 16, "layers": 2, "heads": 2, "train_length": L, "score": score, **changes},
    )
    model = CausalLM(config).double().eval()
    with torch.no_grad():
        model.embedding.weight.mul_(3)
    return model


MODEL = _model(tie_head=False, init_std=1.0)


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
    for prompt, answer, long in zip(
        PROMPTS, generate(MODEL, PROMPTS, 12, stop=[stop]), whole, strict=True
    ):
        end = long.tokens.index(stop) if stop in long.tokens else None
        assert answer.tokens == long.tokens[:end], prompt
        assert answer.ended == ("length" if end is None else "stop")
    for same in (np.int64(stop), torch.tensor(stop)):
        assert generate(MODEL, PROMPTS, 12, stop=[same])[2].ended == "stop"


def test_a_stop_string_ends_the_text_and_may_span_tokens() -> None:
    [whole] = generate(MODEL, PROMPTS[:1], 12, decode=_decode)
    assert whole.text == _decode(whole.tokens)
    text = whole.text
    stop = text[5:8]
    [answer] = generate(MODEL, PROMPTS[:1], 12, stop=[stop, "zzzz"], decode=_decode)
    first = text.index(stop)
    assert answer.ended == "stop"
    assert answer.text == text[:first]
    assert answer.tokens == whole.tokens[: first + 3]


@pytest.mark.parametrize(
    ("prompts", "settings", "words"),
    [
        ([[1], []], {}, "prompt 1 is empty"),
        ([], {}, "there is no prompt"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([[1, 29]], {}, "vocabulary is 0 to 28"),
        ([[1]], {"stop": [29]}, "stop token 29"),
        ([[1]], {"stop": [""]}, "stop string is empty"),
        ([[1]], {"stop": ["a"]}, "need decode"),
        ([[1]], {"stop": [True]}, "stop takes token ids, whole numbers, and strings, not True"),
        ([[1]], {"stop": [torch.tensor([1, 2])]}, "stop takes token ids"),
        ([[1]], {"top_k": 2}, "temperature"),
        ([[1]], {"chunk": 0}, "chunk is 0"),
        ([[1], [2]], {"seed": [1]}, "1 seeds were given for 2 prompts"),
    ],
)
def test_what_is_refused(prompts: list[list[int]], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        generate(MODEL, prompts, **{"max_new_tokens": 2, **settings})

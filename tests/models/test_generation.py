"""`generate`: each row by itself, which tokens can come, how often; beam search by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from normattn.errors import InputError
from normattn.models.beam_search import beam_search, stable_topk
from normattn.models.causal_lm import CausalLM
from normattn.models.config import CausalLMConfig, TranslatorConfig
from normattn.models.generation import Answer, Sampling, generate, row_generators
from normattn.models.translator import Translator

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
def test_a_row_is_independent_of_neighbours_and_earlier_calls(settings: dict[str, Any]) -> None:
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
        (chance,), (tokens,) = sampling.probabilities(logits)
        return {t: p for t, p in zip(tokens.tolist(), chance.tolist(), strict=True) if p > 0}

    assert support(Sampling(1.0, **settings), LOGITS) == pytest.approx(expected)
    # Equally likely tokens are ordered by their id.
    assert support(Sampling(1.0, top_k=2), torch.zeros(1, 5)) == {0: 0.5, 1: 0.5}
    assert Sampling().next_tokens(torch.zeros(1, 5), row_generators(0, 1)) == [0]
    with pytest.raises(InputError, match="not finite"):
        Sampling().next_tokens(LOGITS + math.nan, row_generators(0, 1))


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
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1.0, "top_k": 0}, "top_k must be a whole number of at least 1"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p is 0"),
        ({"top_p": 0.5}, "temperature 0"),
    ],
)
def test_bad_input(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        generate(MODEL, **{"prompts": [[1]], "max_new_tokens": 2, **settings})


# Beam search.
PAD, BOS, EOS = 0, 1, 2


def _translator(words: int = 7, sharp: float = 4.0, **changes: Any) -> Translator:
    """A random model whose predictions are far from even."""
    values: dict[str, Any] = {"source_vocab": words, "dim": 16, "heads": 2, "train_length": 8}
    values |= {"layers": 1, "decoder_layers": 2, "score": "CosA-logn", "tie_head": False, **changes}
    torch.manual_seed(3)
    model = Translator(TranslatorConfig(**values)).double().eval()
    model.head_weight.data *= sharp
    return model


TRANSLATOR = _translator()
SOURCES = [[3, 4, 5, 2], [6, 2], [5, 5, 3, 6, 4, 3, 2], [2], [4, 3, 2]]


Ended = tuple[tuple[int, ...], float, float]  # tokens, score, log p


@lru_cache
def _log_p(model: Translator, source: tuple[int, ...], written: tuple[int, ...]) -> Tensor:
    """log p of the next token, computed from the whole text."""
    target = torch.tensor([[BOS, *written]])
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([source]), target)[0, -1]
    return logits.log_softmax(-1)


def _by_hand(
    model: Translator, source: list[int], beam: int, penalty: float, limit: int
) -> list[Ended]:
    """Beam search with lists, one source, no cache and no early end."""
    alive: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended: list[Ended] = []
    for length in range(limit + 1):
        options = []
        for rank, (total, written) in enumerate(alive):
            log_p = _log_p(model, tuple(source), written)
            for word in range(model.config.target_size):
                if word in (PAD, BOS) or (length == limit and word != EOS):
                    continue
                options.append((total + float(log_p[word]), rank, word, written))
        options.sort(key=lambda each: (-each[0], each[1], each[2]))
        best = options[: beam - len(ended)]
        alive = [(total, (*written, word)) for total, _, word, written in best if word != EOS]
        for total, _, word, written in best:
            if word == EOS:
                ended.append((written, total / math.pow((5 + length + 1) / 6, penalty), total))
    return sorted(ended, key=lambda each: -each[1])


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    beam=st.integers(1, 5),
    penalty=st.sampled_from([0.0, 0.6, 1.0]),
    limit=st.integers(1, 5),
    rows=st.lists(st.integers(0, 4), min_size=1, max_size=4),
)
def test_beam_search_is_one_by_hand_of_each_source_alone(
    beam: int, penalty: float, limit: int, rows: list[int]
) -> None:
    how: dict[str, Any] = {"length_penalty": penalty, "max_length": limit}
    found = beam_search(TRANSLATOR, [SOURCES[row] for row in rows], beam=beam, **how)
    for row, ours in zip(rows, found, strict=True):
        hand = _by_hand(TRANSLATOR, SOURCES[row], beam, penalty, limit)
        assert ours[0].tokens == hand[0][0]
        assert ours[0].score == pytest.approx(hand[0][1], abs=1e-9)
        known = {each[0]: each[2] for each in hand}
        for one in ours:
            assert one.log_probability == pytest.approx(known[one.tokens], abs=1e-9)
        assert [one.score for one in ours] == sorted((one.score for one in ours), reverse=True)


@pytest.mark.parametrize(
    "scores",
    [
        {"score": "KNA", "decoder_score": "KNA-ReRoPE(window=2)"},
        {"score": "Baseline-RealFormer"},
        {"score": "KNA", "shared_layers": True},
    ],
)
def test_beams_of_other_scores_and_one_beam(scores: dict[str, Any]) -> None:
    model = _translator(**scores)
    found = beam_search(model, SOURCES[:3], beam=1, max_length=5)
    for source, (ours,) in zip(SOURCES, found, strict=False):
        [(tokens, _, total)] = _by_hand(model, source, 1, 0.6, 5)
        assert ours.tokens == tokens
        assert ours.log_probability == pytest.approx(total, abs=1e-9)


def test_a_beam_search_leaves_the_mode_and_keeps_to_the_limit() -> None:
    model, few = _translator(dropout=0.5).train(), SOURCES[1:4]
    best_each = [found[0] for found in beam_search(model, few, beam=3)]
    assert model.training
    limits = [2 * len(source) + 10 for source in few]
    assert all(len(one.tokens) <= most for one, most in zip(best_each, limits, strict=True))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=4),
    st.integers(1, 6),
)
def test_of_equal_values_the_first_are_best(rows: list[list[int]], count: int) -> None:
    values, places = stable_topk(torch.tensor(rows, dtype=torch.float64), count)
    for row, value, place in zip(rows, values.tolist(), places.tolist(), strict=True):
        expected = sorted(range(6), key=lambda at: (-row[at], at))[:count]
        assert place == expected
        assert value == [row[at] for at in expected]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beam": 0}, "beam must be a whole number"),
        ({"max_length": 0}, "max_length must be a whole number"),
        ({"length_penalty": -1.0}, "length_penalty is -1.0"),
        ({"sources": []}, "there is no source"),
        ({"sources": [[3], []]}, "a source has no tokens"),
        ({"sources": [[3, 0, 4]]}, "holds the padding token"),
        ({"sources": [[3, 9]]}, "vocabulary is 0 to 6"),
    ],
)
def test_a_beam_search_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        beam_search(TRANSLATOR, **{"sources": SOURCES, **changes})
    broken = _translator()
    broken.head_weight.data.fill_(math.nan)
    with pytest.raises(InputError, match="not finite"):
        beam_search(broken, SOURCES)

"""Beam search against searches written out, without a cache, and against all there is."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from normattn.errors import InputError
from normattn.models.beam_search import beam_search, stable_topk
from normattn.models.config import TranslatorConfig
from normattn.models.translator import Translator

PAD, BOS, EOS = 0, 1, 2


def _model(words: int = 7, sharp: float = 4.0, **changes: Any) -> Translator:
    """A random model whose predictions are far from even."""
    values: dict[str, Any] = {"source_vocab": words, "dim": 16, "heads": 2, "train_length": 8}
    values |= {"layers": 1, "decoder_layers": 2, "score": "CosA-logn", "tie_head": False, **changes}
    torch.manual_seed(3)
    model = Translator(TranslatorConfig(**values)).double().eval()
    model.head_weight.data *= sharp
    return model


MODEL = _model()
SOURCES = [[3, 4, 5, 2], [6, 2], [5, 5, 3, 6, 4, 3, 2], [2], [4, 3, 2]]


@lru_cache
def _log_p(model: Translator, source: tuple[int, ...], written: tuple[int, ...]) -> Tensor:
    """log p of the next token, everything computed anew."""
    target = torch.tensor([[BOS, *written]])
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([source]), target)[0, -1]
    return logits.log_softmax(-1)


def _by_hand(
    model: Translator, source: list[int], beam: int, penalty: float, limit: int
) -> list[tuple[tuple[int, ...], float, float]]:
    """Beam search with lists, one source, no cache and no early end."""
    alive: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended: list[tuple[tuple[int, ...], float, float]] = []
    for length in range(limit + 1):
        options = []
        for rank, (total, written) in enumerate(alive):
            log_p = _log_p(model, tuple(source), written)
            for word in range(model.config.target_size):
                if word in (PAD, BOS) or (length == limit and word != EOS):
                    continue
                options.append((total + float(log_p[word]), rank, word, written))
        options.sort(key=lambda each: (-each[0], each[1], each[2]))
        alive_next = []
        for total, _, word, written in options[: beam - len(ended)]:
            if word == EOS:
                score = total / math.pow((5 + length + 1) / 6, penalty)
                ended.append((written, score, total))
            else:
                alive_next.append((total, (*written, word)))
        alive = alive_next
        if not alive:
            break
    return sorted(ended, key=lambda each: -each[1])


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    beam=st.integers(1, 5),
    penalty=st.sampled_from([0.0, 0.6, 1.0]),
    limit=st.integers(1, 5),
    rows=st.lists(st.integers(0, 4), min_size=1, max_size=4),
)
def test_it_is_a_search_by_hand_of_each_source_alone(
    beam: int, penalty: float, limit: int, rows: list[int]
) -> None:
    how: dict[str, Any] = {"length_penalty": penalty, "max_length": limit}
    found = beam_search(MODEL, [SOURCES[row] for row in rows], beam=beam, **how)
    for row, ours in zip(rows, found, strict=True):
        hand = _by_hand(MODEL, SOURCES[row], beam, penalty, limit)
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
def test_other_scores_and_one_beam(scores: dict[str, Any]) -> None:
    model = _model(**scores)
    found = beam_search(model, SOURCES[:3], beam=1, max_length=5)
    for source, (ours,) in zip(SOURCES, found, strict=False):
        [(tokens, _, total)] = _by_hand(model, source, 1, 0.6, 5)
        assert ours.tokens == tokens
        assert ours.log_probability == pytest.approx(total, abs=1e-9)


def test_it_leaves_the_mode_and_keeps_to_the_limit() -> None:
    model, few = _model(dropout=0.5).train(), SOURCES[1:4]
    best_each = [found[0] for found in beam_search(model, few, beam=3)]
    assert model.training
    limits = [2 * len(source) + 10 for source in few]
    assert all(len(one.tokens) <= most for one, most in zip(best_each, limits, strict=True))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=4),
    st.integers(1, 6),
)
def test_best_orders_equal_values_by_place(rows: list[list[int]], count: int) -> None:
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
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        beam_search(MODEL, **{"sources": SOURCES, **changes})
    broken = _model()
    broken.head_weight.data.fill_(math.nan)
    with pytest.raises(InputError, match="not finite"):
        beam_search(broken, SOURCES)

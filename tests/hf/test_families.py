"""Families that differ in how they attend: static caches, ragged batches, beams, half precision.

What a method does to a family, its undoing and transformers' own cache: `matrix.row`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StaticCache

import normattn
from thorough import half_of

from .families import LENGTH, build, logits, model_of, tokens
from .matrix import stepwise

CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-4}
# One for each way in: attention of our own with keys unrotated, rotated, and by blocks of rows.
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("ReRoPE-logn+", {"window": 3}),
    ("YaRN-logn+", {"factor": 4}),
    ("DynamicNTK", {}),
    ("DualChunk", {}),
]
# Plain, windows with a cap, two bases, layers without positions, interleaved, a part, a sink.
FAMILIES = ("Llama", "Gemma2", "Gemma3", "SmolLM3", "Cohere", "Glm4", "GptOss")
every_family = pytest.mark.parametrize("family", FAMILIES)


def _steps(ids: Tensor) -> list[int]:
    return [5, 7, *[1] * (ids.shape[1] - 12)]


@pytest.mark.parametrize(("family", "how"), half_of(FAMILIES, METHODS))
def test_a_static_cache_agrees_with_one_forward(
    family: str, how: tuple[str, dict[str, Any]]
) -> None:
    (method, values), model, ids = how, model_of(family), tokens(1, 2 * LENGTH - 1)
    with normattn.extend(model, method, **values):
        whole = logits(model, ids)
        fixed = StaticCache(config=model.config, max_cache_len=ids.shape[1] + 3)
        torch.testing.assert_close(stepwise(model, ids, _steps(ids), fixed), whole, **CLOSE)


@every_family
def test_a_ragged_batch_reads_each_row_alone(family: str) -> None:
    model, ids = model_of(family), tokens(3, 2 * LENGTH + 1)
    ids[1, :5] = 0
    ids[2, :11] = 0
    mask = (ids != 0).long()
    for method, values in METHODS[:2]:
        with normattn.extend(model, method, **values):
            whole = logits(model, ids, attention_mask=mask)
            cached = stepwise(model, ids, _steps(ids), attention_mask=mask)
            for row, start in enumerate((0, 5, 11)):
                alone = logits(model, ids[row : row + 1, start:])[0]
                torch.testing.assert_close(whole[row, start:], alone, **CLOSE)
                torch.testing.assert_close(cached[row, start:], alone, **CLOSE)


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_beam_search_and_ragged_prompts(family: str) -> None:
    model = model_of(family)
    asked: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "num_beams": 2}
    ids = tokens(2, 14)
    ids[1, :4] = 0
    mask = (ids != 0).long()
    with normattn.extend(model, "ReRoPE-logn+", window=3):
        together = model.generate(ids, attention_mask=mask, **asked)
        fixed = model.generate(ids, attention_mask=mask, cache_implementation="static", **asked)
        alone = model.generate(ids[1:, 4:], attention_mask=torch.ones(1, 10).long(), **asked)
    assert torch.equal(together, fixed)
    assert torch.equal(together[1, 4:], alone[0])


@pytest.mark.parametrize("method", ["logn+", "ReRoPE", "YaRN", "ReRoPE beyond its window"])
def test_half_precision_keeps_large_scores(method: str) -> None:
    """Scores of deviation 20, as trained models have, are not rounded before softmax."""
    far = method.endswith("window")
    exact, ids = build("Llama"), tokens(2, 200 if far else 40)
    for name, weight in exact.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            weight.data *= 30
    rough = copy.deepcopy(exact).bfloat16()
    values: dict[str, Any] = {"train_length": 64}
    values |= {"YaRN": {"factor": 1}, "logn+": {}}.get(method, {"window": 40})
    as_trained = (logits(rough, ids).float() - logits(exact, ids)).abs().mean()
    name = method.partition(" ")[0]
    with normattn.extend(rough, name, **values), normattn.extend(exact, name, **values):
        found = logits(rough, ids)
        assert found.dtype == torch.bfloat16
        assert (found.float() - logits(exact, ids)).abs().mean() < 1.2 * as_trained

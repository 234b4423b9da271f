"""No query is an empty result, by every kernel that can serve it; no error and no NaN."""

from __future__ import annotations

import pytest

from normattn import InputError, attention
from normattn.kernels import BACKENDS
from score.cases import built, tensors
from score.recipe import Recipe

RECIPES = [
    Recipe("KNA", "logn", train_length=4),
    Recipe("Baseline", method="DynamicNTK"),
    Recipe("Baseline", method="ReRoPE", window=2),
    Recipe("Baseline", method="StreamingLLM"),
    Recipe("QKRMSNorm", "", "none", bias="KERPLELog", sink=True, cap=2.0),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=[r.text for r in RECIPES])
def test_an_empty_result(recipe: Recipe) -> None:
    q, k, v = tensors((2, 2, 0, 4), (2, 1, 7, 4), (2, 1, 7, 4))
    score, served = built(recipe, 2, 4, 1), set()
    for backend in BACKENDS:
        try:
            out = attention(q, k, v, score, backend=backend)
        except InputError as refusal:
            if "kernel cannot serve this" not in str(refusal):
                raise
            continue
        served.add(backend)
        assert out.shape == (2, 2, 0, 4)
        out.sum().backward()  # type: ignore[no-untyped-call]
        assert k.grad is not None
        assert not k.grad.any()
    assert {"auto", "chunked", "reference"} <= served

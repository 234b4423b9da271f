"""Every registered score, by every kernel: outputs and gradients against two independent writings.

The oracle is a double loop in numpy, the gradients are autograd's of the naive torch formula.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from normattn import InputError, ScoreSpec, attention
from normattn.kernels import tiles
from normattn.score.registry import parts
from score import naive, oracle
from score.cases import LOGN, PLACES, VARIANTS, array, built, learned, recipes, tensors

B, H, G, T, D = 2, 2, 1, 9, 4


def test_the_cases_name_every_registered_part() -> None:
    named = {*VARIANTS, *LOGN, *(method for _, method in PLACES), "RoPE", "NoPE"} - {""}
    assert named == set(parts())


def _gradients(out: Tensor, wanted: list[Tensor]) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1.0, 1.0, out.numel(), dtype=out.dtype).reshape(out.shape)
    return torch.autograd.grad((out * weights).sum(), wanted)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_and_gradients(variant: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "ROWS", 4)
    q, k, v = tensors((B, H, T, D), (B, G, T, D), (B, G, T, D))
    for turn, recipe in enumerate(recipes(variant)):
        score = built(recipe, H, D, G)
        names = learned(score)
        wanted = [q, k, v, *names.values()]
        if causal and recipe.leaks:
            with pytest.raises(InputError, match="leaks the future"):
                attention(q, k, v, score)
            continue
        if not causal and recipe.method == "ReRoPE":
            with pytest.raises(InputError, match="causal attention only"):
                attention(q, k, v, score, causal=False)
            continue
        expected = naive.attend(recipe, q, k, v, causal=causal, learned=names)
        if turn % 3 == 0 or not recipe.logn:
            values = {name: array(value) for name, value in names.items()}
            looped = oracle.attend(
                recipe, array(q), array(k), array(v), causal=causal, learned=values
            )
            torch.testing.assert_close(expected.detach(), torch.from_numpy(looped))
        by_hand = _gradients(expected, wanted)
        for backend in ("reference", "chunked", "auto", "fused"):
            if backend == "fused" and recipe.method == "ReRoPE":
                with pytest.raises(InputError, match="two regimes"):
                    attention(q, k, v, score, causal, backend="fused")
                continue
            out = attention(q, k, v, score, causal, backend=backend)
            where = f"{recipe.text} by {backend}"
            _close(out, expected, where)
            for ours, hand in zip(_gradients(out, wanted), by_hand, strict=True):
                _close(ours, hand, where)


def _close(ours: Tensor, expected: Tensor, where: str) -> None:
    torch.testing.assert_close(
        ours, expected, rtol=1e-9, atol=1e-10, msg=lambda text: f"{where}: {text}"
    )


@pytest.mark.parametrize("variant", [name for name in VARIANTS if "Norm" not in name])
def test_a_bare_specification_is_enough_where_nothing_is_learned(variant: str) -> None:
    q, k, v = tensors((B, H, T, D), (B, G, T, D), (B, G, T, D))
    for recipe in recipes(variant):
        spec = ScoreSpec.parse(recipe.text)
        bare = attention(q, k, v, spec)
        assert torch.equal(bare, attention(q, k, v, recipe.text))
        assert torch.equal(bare, attention(q, k, v, built(recipe, H, D, G)))

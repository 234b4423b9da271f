"""Differential attention: pairs of heads against a float64 oracle, kernels, caches, models."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest
import torch
from torch import Tensor

from layers.written_out import assert_every_kernel_agrees
from normattn import Score, attention
from normattn.kernels import reference, tiled
from normattn.layers.residual_scores import residual_layers
from score import oracle
from score.cases import PAIRED, drawn, learned, tensors
from score.recipe import Recipe

B, H, G, T, D = 2, 8, 4, 11, 8
SHAPES = (B, H, T, D), (B, G, T, D), (B, G, T, D)
LEAST = 0.8 - 0.6  # λ_init of the first layer
RECIPES = (
    Recipe("Baseline", "", "none"),
    Recipe("KNA", "logn"),
    Recipe("QKRMSNorm", "", "none", bias="ALiBi", sink=True),
    Recipe("KNA", "logn+", "interleaved", "ReRoPE"),
    Recipe("CosA", "SSMax", "half", bias="FIRE"),
    Recipe("QNA", "", "half", "DynamicNTK", train_length=4),
)


def _score(recipe: Recipe, paired: str) -> Score:
    text, _, length = recipe.text.partition("@")
    return drawn(Score(f"{text}-{paired}@{length}", H, D, G), 0.1, 0.6)


def _learned(score: Score) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the scores of the heads learn in the oracle's words, and what pairs learn."""
    found = learned(score)
    pairs = {name: x for name, x in found.items() if name.startswith("difference.")}
    heads = {name: x for name, x in found.items() if name not in pairs}
    return heads, {name.removeprefix("difference."): x for name, x in pairs.items()}


def _differences(o: Tensor, paired: str, learned: Mapping[str, Tensor]) -> Tensor:
    """Heads (B, H, T, 2·D) to (B, H, T, D); H/G heads share a key head."""
    init, eps = (0.5, 0.01) if "init" in paired else (LEAST, 1e-5)
    share = (learned["q1"] @ learned["k1"]).exp() - (learned["q2"] @ learned["k2"]).exp() + init
    one, other = o.reshape(B, G // 2, 2, H // G, *o.shape[2:]).unbind(2)
    x = one - share * other
    x = (1 - init) * learned["gain"] * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return torch.stack((x[..., :D], x[..., D:]), 2).reshape(B, H, *x.shape[3:-1], D)


@pytest.mark.parametrize("paired", PAIRED)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.text)
def test_every_kernel(recipe: Recipe, paired: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients."""
    monkeypatch.setattr(tiled, "ROWS", 4)
    monkeypatch.setattr(reference, "STRIP_BYTES", 2048)
    q, k, v = tensors(*SHAPES)
    score = _score(recipe, paired)
    heads, pairs = _learned(score)
    # Key head g reads v of heads 2·⌊g/2⌋ and 2·⌊g/2⌋ + 1.
    both = v.reshape(B, G // 2, 2, T, D).transpose(2, 3).flatten(3).repeat_interleave(2, 1)
    expected = _differences(oracle.attend(recipe, q, k, both, learned=heads), paired, pairs)
    wanted = [q, k, v, *score.parameters()]
    run, must = partial(attention, q, k, v, score), ("auto", "strips", "reference")
    assert_every_kernel_agrees(run, expected, wanted, must)


def test_residual_scores_are_summed_by_head() -> None:
    """RealFormer sums scores, of which each head of a pair has its own."""
    q, k, v = tensors(*SHAPES)
    plain = _score(Recipe("Baseline", "", "none"), "Differential")
    score = _score(Recipe("Baseline", "", "none"), "RealFormer-Differential")
    plain.load_state_dict(score.state_dict())
    expected = attention(2 * q, k, v, plain)
    for way in ("auto", "concatenated", "residual", "reference"):
        residual = residual_layers(score.spec, 2)
        assert residual is not None
        _, twice = (attention(q, k, v, score, residual=below, backend=way) for below in residual)
        torch.testing.assert_close(twice, expected)

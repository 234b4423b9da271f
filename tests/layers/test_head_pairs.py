"""Differential attention: pairs of heads against a float64 oracle, kernels, caches, models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from normattn import InputError, Score, ScoreSpec, attention
from normattn.kernels import BACKENDS, reference, tiled
from normattn.layers.residual_scores import residual_layers
from normattn.models import CausalLM, CausalLMConfig
from score import oracle
from score.cases import PAIRED, learned, tensors
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


def _score(recipe: Recipe, paired: str, heads: int = H, kv: int = G) -> Score:
    text, _, length = recipe.text.partition("@")
    score = Score(f"{text}-{paired}@{length}", heads, D, kv).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in score.parameters():
            noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise / 2 + 0.1)
    return score


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
def test_outputs_and_gradients_of_every_kernel(
    recipe: Recipe, paired: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled, "ROWS", 4)
    monkeypatch.setattr(reference, "STRIP_BYTES", 2048)
    q, k, v = tensors(*SHAPES)
    score = _score(recipe, paired)
    heads, pairs = _learned(score)
    # Key head g reads v of heads 2·⌊g/2⌋ and 2·⌊g/2⌋ + 1.
    both = v.reshape(B, G // 2, 2, T, D).transpose(2, 3).flatten(3).repeat_interleave(2, 1)
    expected = _differences(oracle.attend(recipe, q, k, both, learned=heads), paired, pairs)
    wanted = [q, k, v, *score.parameters()]
    weights = torch.linspace(-1.0, 1.0, expected.numel()).double().reshape(expected.shape)
    by_hand = torch.autograd.grad(expected, wanted, weights, allow_unused=True)
    assert all(grad is not None for grad in by_hand)
    served = []
    for backend in BACKENDS:
        try:
            out = attention(q, k, v, score, backend=backend)
        except InputError as refusal:
            assert "kernel cannot serve this" in str(refusal)  # noqa: PT017
            continue
        served.append(backend)
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(
            torch.autograd.grad(out, wanted, weights), by_hand, rtol=1e-9, atol=1e-10
        )
    assert {"auto", "strips", "reference"} <= set(served)


def test_residual_scores_are_summed_by_head() -> None:
    """RealFormer sums scores, of which each head of a pair has its own."""
    q, k, v = tensors(*SHAPES)
    for way in ("auto", "concatenated", "residual", "reference"):
        score = _score(Recipe("Baseline", "", "none"), "RealFormer-Differential")
        residual = residual_layers(score.spec, 2)
        assert residual is not None
        _, twice = (attention(q, k, v, score, residual=below, backend=way) for below in residual)
        plain = _score(Recipe("Baseline", "", "none"), "Differential")
        plain.load_state_dict(score.state_dict())
        torch.testing.assert_close(twice, attention(2 * q, k, v, plain))


def _model(score: str, **changes: Any) -> CausalLM:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"vocab_size": 17, "dim": 16, "layers": 3, "heads": 4}
    return CausalLM(
        CausalLMConfig(**settings, train_length=8, score=ScoreSpec.parse(score), **changes)
    ).eval()


def test_each_layer_of_a_model_starts_at_its_own_share() -> None:
    model = _model("KNA-Differential")
    specs = [module.spec for module in model.modules() if isinstance(module, Score)]
    found = [spec.difference.init for spec in specs]  # type: ignore[union-attr]
    assert found == pytest.approx([0.8 - 0.6 * math.exp(-0.3 * (n - 1)) for n in (1, 2, 3)])
    assert str(model.config.score) == "KNA-Differential@8"
    given = _model("KNA-Differential(init=0.8)")
    specs = [module.spec for module in given.modules() if isinstance(module, Score)]
    assert {spec.difference.init for spec in specs} == {0.8}  # type: ignore[union-attr]

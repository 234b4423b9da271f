"""Differential attention: pairs of heads against a float64 oracle, kernels, caches, models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from normattn import Attention, InputError, Score, ScoreSpec, attention, explain
from normattn.kernels import BACKENDS, reference, tiled
from normattn.layers.residual_scores import residual_layers
from normattn.models import CausalLM, CausalLMConfig
from score import naive, oracle
from score.cases import PAIRED, array, learned, tensors
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


def _by_loops(o: Any, paired: str, learned: Mapping[str, Any]) -> Any:
    """Heads (B, H, T, 2·D) to (B, H, T, D), a number at a time; H/G heads share a key head."""
    init, eps = (0.5, 0.01) if "init" in paired else (LEAST, 1e-5)
    q1, k1, q2, k2, gain = (learned[name] for name in ("q1", "k1", "q2", "k2", "gain"))
    dots = [
        sum(float(a) * float(b) for a, b in zip(x, y, strict=True)) for x, y in ((q1, k1), (q2, k2))
    ]
    share = math.exp(dots[0]) - math.exp(dots[1]) + init
    out, each = np.zeros((*o.shape[:3], D)), H // G
    for b, pair, member, t in np.ndindex(o.shape[0], G // 2, each, o.shape[2]):
        one, other = 2 * pair * each + member, (2 * pair + 1) * each + member
        row = [
            float(x) - share * float(y) for x, y in zip(o[b, one, t], o[b, other, t], strict=True)
        ]
        root = math.sqrt(sum(x * x for x in row) / len(row) + eps)
        row = [(1 - init) * float(g) * x / root for g, x in zip(gain, row, strict=True)]
        out[b, one, t], out[b, other, t] = row[:D], row[D:]
    return out


def _naively(o: Tensor, paired: str, learned: Mapping[str, Tensor]) -> Tensor:
    """The same in torch, for gradients."""
    init, eps = (0.5, 0.01) if "init" in paired else (LEAST, 1e-5)
    share = (learned["q1"] @ learned["k1"]).exp() - (learned["q2"] @ learned["k2"]).exp() + init
    one, other = o.reshape(B, G // 2, 2, H // G, *o.shape[2:]).unbind(2)
    x = one - share * other
    x = (1 - init) * learned["gain"] * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return torch.stack((x[..., :D], x[..., D:]), 2).reshape(B, H, *x.shape[3:-1], D)


def _beside(v: Any, joined: Any) -> Any:
    """Key head g reads v of heads 2·⌊g/2⌋ and 2·⌊g/2⌋ + 1."""
    first = [2 * (g // 2) for g in range(v.shape[1])]
    return joined((v[:, first], v[:, [g + 1 for g in first]]), -1)


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
    expected = _naively(
        naive.attend(recipe, q, k, _beside(v, torch.cat), learned=heads), paired, pairs
    )
    by_loop = oracle.attend(
        recipe,
        array(q),
        array(k),
        _beside(array(v), np.concatenate),
        learned={name: array(value) for name, value in heads.items()},
    )
    by_loop = _by_loops(by_loop, paired, {name: array(x) for name, x in pairs.items()})
    torch.testing.assert_close(expected.detach(), torch.from_numpy(by_loop))
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
        for ours, hand in zip(torch.autograd.grad(out, wanted, weights), by_hand, strict=True):
            torch.testing.assert_close(ours, hand, rtol=1e-9, atol=1e-10)
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
    ids = torch.arange(14).reshape(1, 14)
    before = model(ids)
    with model.using("YaRN", factor=2):
        assert not torch.equal(model(ids), before)
    assert torch.equal(model(ids), before)
    layer = Attention(16, 4, score="KNA-Differential")
    out = layer(torch.randn(1, 5, 16))
    grads = torch.autograd.grad(out.square().sum(), list(layer.parameters()))
    assert all(grad.abs().sum() > 0 for grad in grads)


def test_key_heads_of_a_model_come_in_pairs_and_what_explain_says() -> None:
    with pytest.raises(InputError, match="must be even"):
        _model("KNA-Differential", kv_heads=1)
    told = explain("KNA-Differential", (1, 4, 64, 8))
    assert told.kernel == "chunked"
    assert any("Differential" in line for line in told.left)

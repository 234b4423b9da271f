"""ScaleInvariant and ASScale, pair by pair; nGPT's score, DyT and Derf by their equations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from normattn import Score, ScoreSpec, attention
from normattn.kernels import AttentionMask
from normattn.score.parts import rope_frequencies

from .cases import tensors

B, H, G, T, D = 2, 4, 2, 9, 4
BACKENDS = ("auto", "reference", "strips")


def _check(score: Score, logits: Tensor, leaves: list[Tensor]) -> None:
    """Softmax of these logits over keys up to the query, and every gradient."""
    q, k, v = leaves[:3]
    seen = torch.ones(T, T, dtype=torch.bool).tril()
    expected = logits.masked_fill(~seen, -math.inf).softmax(-1) @ v.repeat_interleave(H // G, 1)
    weights = torch.linspace(-1, 1, expected.numel()).double().view_as(expected)
    by_hand = torch.autograd.grad(expected, leaves, weights)
    for backend in BACKENDS:
        out = attention(q, k, v, score, backend=backend)
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
        for ours, hand in zip(torch.autograd.grad(out, leaves, weights), by_hand, strict=True):
            torch.testing.assert_close(ours, hand, rtol=1e-9, atol=1e-10)


def _products(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.repeat_interleave(H // G, 1).mT


def test_distant_scores_are_spread_and_lowered() -> None:
    leaves = q, k, _ = tensors((B, H, T, D), (B, G, T, D), (B, G, T, D))
    a, m = torch.ones(T, T).double(), torch.zeros(T, T).double()
    for i in range(T):
        for j in range(i):
            square = 1 + 2 * math.log((i - j) / 3 + 1)
            a[i, j], m[i, j] = math.sqrt(square), 1 - square
    score = Score("Baseline-ScaleInvariant(tau=3)", H, D, G)
    _check(score, a * _products(q, k) / math.sqrt(D) + m, list(leaves))


def test_each_head_learns_a_power_of_the_logarithm() -> None:
    leaves = q, k, _ = tensors((B, H, T, D), (B, G, T, D), (B, G, T, D))
    torch.manual_seed(0)
    score = Score("Baseline-NoPE-ASScale(delta=0.5)", H, D, G).double()
    learned = dict(score.named_parameters())
    beta, gamma = learned["logn.beta"], learned["logn.gamma"]
    assert bool(((beta > 0.1) & (beta < 1)).all())
    grown = [
        torch.stack([0.5 + beta[h] * math.log(n + 1) ** gamma[h] for n in range(1, T + 1)])
        for h in range(H)
    ]
    factor = torch.stack(grown)[None, :, :, None]
    _check(score, factor * _products(q, k) / math.sqrt(D), [*leaves, beta, gamma])


def test_the_score_of_ngpt() -> None:
    """Rotated, divided by the length, times a gain of each head's features; √d in front."""
    q, k, v = leaves = tensors((B, H, T, D), (B, H, T, D), (B, H, T, D))
    score = Score("NGPT-RoPE(layout=interleaved)-RotateFirst", H, D).double()
    learned = dict(score.named_parameters())
    with torch.no_grad():
        for seed, gain in enumerate(learned.values()):
            assert gain.shape == (H, D)
            gain.copy_(tensors((H, D), seed=seed)[0])

    def made(x: Tensor, gain: Tensor) -> Tensor:
        angle = torch.arange(T)[:, None] * rope_frequencies(D, 10000.0)
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], D // 2, 2))
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
        unit: Tensor = turned / turned.norm(dim=-1, keepdim=True)
        return unit * gain[:, None]

    made_k = made(k, learned["key_norm.weight"])
    logits = math.sqrt(D) * made(q, learned["query_norm.weight"]) @ made_k.mT
    seen = torch.ones(T, T, dtype=torch.bool).tril()
    expected = logits.masked_fill(~seen, -math.inf).softmax(-1) @ v
    wanted = [*leaves, *learned.values()]
    weights = torch.linspace(-1, 1, expected.numel()).double().view_as(expected)
    by_hand = torch.autograd.grad(expected, wanted, weights)
    for backend in BACKENDS:
        out = attention(q, k, v, score, backend=backend)
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
        for ours, hand in zip(torch.autograd.grad(out, wanted, weights), by_hand, strict=True):
            torch.testing.assert_close(ours, hand, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["QKDyT", "QKDerf"])
def test_queries_and_keys_are_bounded_feature_by_feature(name: str) -> None:
    q, k, v = leaves = tensors((B, H, T, D), (B, 1, T, D), (B, 1, T, D))
    score = Score(f"{name}-NoPE", H, D, 1).double()
    learned = dict(score.named_parameters())
    shapes = {"alpha": (), "weight": (D,), "bias": (D,)} | ({"shift": ()} if "Derf" in name else {})
    for side in ("query_norm", "key_norm"):
        own = {key: tuple(learned[f"{side}.{key}"].shape) for key in shapes}
        assert own == shapes
    assert len(learned) == 2 * len(shapes)
    with torch.no_grad():
        for seed, parameter in enumerate(learned.values()):
            parameter.copy_(tensors((*parameter.shape, 1), seed=seed)[0][..., 0])

    def made(x: Tensor, side: str) -> Tensor:
        own = {key: learned[f"{side}.{key}"] for key in shapes}
        stretched = own["alpha"] * x
        erf = "shift" in own
        bounded = (
            torch.erf(stretched + own["shift"]) if erf else 1 - 2 / (1 + (2 * stretched).exp())
        )
        return bounded * own["weight"] + own["bias"]

    logits = made(q, "query_norm") @ made(k, "key_norm").mT / math.sqrt(D)
    seen = torch.ones(T, T, dtype=torch.bool).tril()
    expected = logits.masked_fill(~seen, -math.inf).softmax(-1) @ v
    wanted = [*leaves, *learned.values()]
    weights = torch.linspace(-1, 1, expected.numel()).double().view_as(expected)
    by_hand = torch.autograd.grad(expected, wanted, weights)
    for backend in BACKENDS:
        out = attention(q, k, v, score, backend=backend)
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
        for ours, hand in zip(torch.autograd.grad(out, wanted, weights), by_hand, strict=True):
            torch.testing.assert_close(ours, hand, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("alpha", [1.05, 1.5, 2.0])
@pytest.mark.parametrize("keys", [1, 3, 5000])
def test_weights_of_entmax_add_up_and_leave_keys_out(alpha: float, keys: int) -> None:
    score = 4 * tensors((1, 1, 2, keys), seed=1)[0].detach()
    score[0, 0, 1] = -math.inf
    part: Any = ScoreSpec.parse(f"Baseline-Entmax(alpha={alpha})").normaliser
    at = torch.arange(keys)
    weight = part.weights(score, AttentionMask(False, at[-2:], at, True, None, None))
    torch.testing.assert_close(weight[0, 0].sum(-1), torch.tensor([1.0, 0.0]).double())
    if keys == 5000 and alpha >= 1.5:
        assert (weight[0, 0, 0] == 0).double().mean() > 0.9


def test_pairs_without_a_whole_turn_stay() -> None:
    part: Any = ScoreSpec.parse("Baseline-HoPE@512").position
    theta = rope_frequencies(64, 10000.0)
    kept = part.adjusted(theta) != 0
    assert kept.tolist() == [2 * math.pi / each <= 512 for each in theta.tolist()]
    # Stretched afterwards, the same pairs turn.
    slower = part.adjusted(theta / 8)
    assert torch.equal(slower != 0, kept)

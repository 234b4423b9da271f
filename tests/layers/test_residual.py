"""Residual placements against their equations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from normattn.layers import NGPT, RMSNorm
from normattn.layers.residual import (
    AttnRes,
    DeepNorm,
    LayerOutputs,
    PostLN,
    PreLN,
    ReZero,
    deepnorm_factors,
)


class Square(nn.Module):
    """A sub-layer that anyone can compute."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return scale * x.square()


def _norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


X = torch.linspace(-2, 3, 24, dtype=torch.float64).view(1, 3, 8)


def _rms() -> RMSNorm:
    return RMSNorm(8, gain=False)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (PreLN(Square(), _rms()), X + 3 * _norm(X).square()),
        (PostLN(Square(), _rms()), _norm(X + 3 * X.square())),
        (DeepNorm(Square(), _rms(), alpha=1.7), _norm(1.7 * X + 3 * X.square())),
    ],
)
def test_where_the_norm_stands(layer: nn.Module, expected: Tensor) -> None:
    """The sub-layer gets what its context names."""
    torch.testing.assert_close(layer(X, scale=3.0), expected)


def test_rezero_starts_as_the_identity_and_learns_to_leave_it() -> None:
    layer = ReZero(Square(), _rms()).double()
    assert torch.equal(layer(X), X)
    layer(X).sum().backward()
    assert layer.alpha.grad is not None
    torch.testing.assert_close(layer.alpha.grad, _norm(X).square().sum())


@pytest.mark.parametrize("block", [1, 2, 3])
def test_attention_residuals_against_their_equation(block: int) -> None:
    """A softmax by hand over the embedding and the sums of finished and unfinished blocks."""
    layers = [AttnRes(Square(), _rms(), 8, block=block).double() for _ in range(5)]
    generator = torch.Generator().manual_seed(block)
    for layer in layers:
        layer.query.data = torch.randn(8, dtype=torch.float64, generator=generator)

    stream, ours = LayerOutputs((X,)), X.clone().requires_grad_()
    stream = LayerOutputs((ours,))
    for layer in layers:
        stream = layer(stream)

    x = X.clone().requires_grad_()
    outputs: list[Tensor] = []
    for layer in layers:
        starts = range(0, len(outputs), block)
        seen = [x, *(sum(outputs[n : n + block], torch.zeros(())) for n in starts)]
        weights = torch.stack([_norm(v) @ layer.query for v in seen]).exp()
        h = sum((w / weights.sum(0))[..., None] * v for w, v in zip(weights, seen, strict=True))
        outputs.append(_norm(h).square())
    expected = [sum(outputs[n : n + block], torch.zeros(())) for n in range(0, 5, block)]
    torch.testing.assert_close(stream.sums[1:], expected)
    leaves = [layer.query for layer in layers]
    mine = torch.autograd.grad(torch.stack(stream.sums).sum(), [ours, *leaves])
    theirs = torch.autograd.grad(torch.stack([x, *expected]).sum(), [x, *leaves])
    torch.testing.assert_close(mine, theirs)


def test_a_step_towards_the_output_of_the_sub_layer() -> None:
    """h ← justnorm(h + |α|·(justnorm(f) − h)) of the authors, whose h is ours over √d."""
    torch.manual_seed(0)
    inner, dim = nn.Linear(6, 6).double(), 6
    placed = NGPT(inner, RMSNorm(dim, 0.0, gain=False), dim).double()
    x = torch.randn(2, 3, dim, dtype=torch.float64)
    h = x / x.norm(dim=-1, keepdim=True)
    with torch.no_grad():
        placed.alpha.copy_(torch.randn(dim))
    f = inner(h * dim**0.5)
    step = (placed.alpha * (0.05 / dim**-0.5)).abs()
    expected = h + step * (f / f.norm(dim=-1, keepdim=True) - h)
    expected = expected / expected.norm(dim=-1, keepdim=True)
    out = placed(h * dim**0.5)
    torch.testing.assert_close(out, expected * dim**0.5)
    leaves = [placed.alpha, *inner.parameters()]
    weight = torch.linspace(-1, 1, out.numel()).double().view_as(out)
    ours, hand = (torch.autograd.grad(x, leaves, weight) for x in (out, expected * dim**0.5))
    torch.testing.assert_close(ours, hand)


def test_the_first_step_is_a_twentieth() -> None:
    placed = NGPT(nn.Identity(), RMSNorm(4, gain=False), 4)
    torch.testing.assert_close(placed.alpha * 0.05 * 2, torch.full((4,), 0.05))


@pytest.mark.parametrize(
    ("blocks", "sublayers", "alpha", "beta"),
    [
        # The paper's table: (2N)^¼ and (8N)^−¼ for N = 6, 18 and 100 blocks of two.
        (6, 2, 12**0.25, 48**-0.25),
        (18, 2, 36**0.25, 144**-0.25),
        (100, 2, 200**0.25, 800**-0.25),
        # One sub-layer a block.
        (24, 1, 24**0.25, 96**-0.25),
    ],
)
def test_deepnorm_factors(blocks: int, sublayers: int, alpha: float, beta: float) -> None:
    assert deepnorm_factors(blocks, sublayers) == pytest.approx((alpha, beta), rel=1e-12)


def test_dropout_acts_in_training_only() -> None:
    layer = PreLN(Square(), _rms(), dropout=0.5)
    torch.manual_seed(0)
    branch = layer(X) - X
    kept = branch != 0
    assert 0 < kept.sum() < branch.numel()
    torch.testing.assert_close(branch[kept], 2 * _norm(X).square()[kept])
    layer.eval()
    torch.testing.assert_close(layer(X), X + _norm(X).square())

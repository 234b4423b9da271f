"""nGPT's placement: a step on the sphere, against the authors' two lines, and in models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from normattn import InputError, ScoreSpec
from normattn.layers import NGPT, RMSNorm
from normattn.models import CausalLM, CausalLMConfig

SIZES: dict[str, Any] = {"vocab_size": 11, "dim": 16, "layers": 2, "heads": 2, "train_length": 8}


def test_a_step_towards_the_output_of_the_sub_layer() -> None:
    """h ← justnorm(h + |α|·(justnorm(f) − h)) of the authors, whose h is ours over √d."""
    torch.manual_seed(0)
    inner, dim = nn.Linear(6, 6).double(), 6
    placed = NGPT(inner, RMSNorm(dim, 0.0, gain=False), dim, start=0.05).double()
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
    for ours, hand in zip(
        torch.autograd.grad(out, leaves, weight),
        torch.autograd.grad(expected * dim**0.5, leaves, weight),
        strict=True,
    ):
        torch.testing.assert_close(ours, hand)


def test_the_first_step_is_a_twentieth() -> None:
    placed = NGPT(nn.Identity(), RMSNorm(4, gain=False), 4)
    torch.testing.assert_close(placed.alpha * 0.05 * 2, torch.full((4,), 0.05))


def test_a_model_on_the_sphere_learns_and_reads_on() -> None:
    torch.manual_seed(0)
    score = ScoreSpec.parse("NGPT-RotateFirst")
    model = CausalLM(CausalLMConfig(**SIZES, placement="nGPT", score=score))
    ids = torch.randint(0, 11, (4, 8))
    model.loss(ids).loss.backward()  # type: ignore[no-untyped-call]
    still = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()]
    assert still == []
    model.eval()
    cache = model.new_cache()
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in torch.split(ids, [3, 1, 4], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(ids), rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="norm_gain has no meaning"):
        CausalLMConfig(**SIZES, placement="nGPT", norm_gain=False)

"""DyT and Derf against their equations, written out number by number, and in models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from normattn import InputError
from normattn.layers import Derf, DyT
from normattn.models import CausalLM, CausalLMConfig


@pytest.mark.parametrize("kind", [DyT, Derf])
def test_against_the_equation(kind: type[DyT]) -> None:
    norm = kind(3).double()
    with torch.no_grad():
        for n, parameter in enumerate(norm.parameters()):
            parameter.copy_(torch.linspace(0.3, 0.7 + n / 5, parameter.numel()).view_as(parameter))
    x = torch.tensor([[-2.0, 0.0, 0.4], [1.0, 30.0, -0.1]], dtype=torch.float64, requires_grad=True)
    alpha, gain, bias = norm.alpha.item(), norm.gain, norm.bias
    assert gain is not None
    assert bias is not None
    shift = norm.shift.item() if isinstance(norm, Derf) else 0.0
    squash = math.erf if kind is Derf else math.tanh
    expected = torch.tensor(
        [
            [
                squash(alpha * value + shift) * gain[n].item() + bias[n].item()
                for n, value in enumerate(row)
            ]
            for row in x.tolist()
        ],
        dtype=torch.float64,
    )
    torch.testing.assert_close(norm(x).detach(), expected)
    assert torch.autograd.gradcheck(norm, x)


@pytest.mark.parametrize("norm", ["dyt", "derf"])
def test_a_model_without_statistics_learns(norm: str) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 11,
        "dim": 16,
        "layers": 2,
        "heads": 2,
        "train_length": 8,
    }
    sizes["norm"] = norm
    model = CausalLM(CausalLMConfig(**sizes))
    ids = torch.randint(0, 11, (4, 8))
    model.loss(ids).loss.backward()  # type: ignore[no-untyped-call]
    still = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()]
    assert still == []
    with pytest.raises(InputError, match="norm_eps has no meaning"):
        CausalLMConfig(**sizes, norm_eps=1e-5)

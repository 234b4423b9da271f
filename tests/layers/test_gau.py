"""The gated attention unit against its formula."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from layers.written_out import rotate
from normattn import CausalLMConfig
from normattn.errors import InputError
from normattn.layers.gau import GatedAttentionUnit

DIM, KEY, VALUE = 6, 8, 12


def _oracle(unit: GatedAttentionUnit, x: Tensor, normalise_keys: bool) -> Tensor:
    linear = x @ unit.expand.weight.T
    inner = linear / (1 + torch.exp(-linear))
    u, v, z = inner[..., :VALUE], inner[..., VALUE : 2 * VALUE], inner[..., 2 * VALUE :]
    if unit.gamma is None:
        q, k = linear[..., 2 * VALUE :].chunk(2, -1)
    else:
        q, k = z * unit.gamma[0], z * unit.gamma[1]
    if unit.beta is not None:
        q, k = q + unit.beta[0], k + unit.beta[1]
    if normalise_keys:
        k = F.normalize(k, dim=-1)
    s = rotate(q) @ rotate(k).transpose(1, 2) / (1 if normalise_keys else math.sqrt(KEY))
    s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -math.inf)
    return (u * (s.softmax(-1) @ v)) @ unit.out.weight.T


@pytest.mark.parametrize("options", [{}, {"offset": True}, {"separate_qk": True}], ids=str)
@pytest.mark.parametrize("score", ["Baseline", "KNA"])
def test_the_unit_is_its_formula_with_gradients(score: str, options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    unit = GatedAttentionUnit(DIM, KEY, score=score, **options).double()
    with torch.no_grad():
        if unit.gamma is not None:
            unit.gamma.normal_()
        if unit.beta is not None:
            unit.beta.normal_()
    x = torch.randn(2, 5, DIM, dtype=torch.float64, requires_grad=True)
    expected = _oracle(unit, x, normalise_keys=score == "KNA")
    torch.testing.assert_close(unit(x), expected, rtol=0, atol=1e-7)
    wanted = [x, *unit.parameters()]
    ours = torch.autograd.grad(unit(x).sin().sum(), wanted)
    for mine, other in zip(ours, torch.autograd.grad(expected.sin().sum(), wanted), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


def test_the_clip_of_separate_projections_scales_the_logits() -> None:
    """q·k is multiplied by the factor, and nothing else changes."""
    torch.manual_seed(0)
    unit = GatedAttentionUnit(DIM, KEY, separate_qk=True, bias=True).double()
    x = torch.randn(1, 5, DIM, dtype=torch.float64)
    q, k, v, u = unit.operands(x)
    unit.shrink(torch.tensor([0.25], dtype=torch.float64))
    smaller_q, smaller_k, same_v, same_u = unit.operands(x)
    torch.testing.assert_close(smaller_q @ smaller_k.mT, 0.25 * q @ k.mT)
    torch.testing.assert_close((same_v, same_u), (v, u))


def test_settings_that_separate_projections_do_not_have_are_refused() -> None:
    with pytest.raises(InputError, match="gamma_std"):
        CausalLMConfig(
            vocab_size=8,
            dim=8,
            layers=1,
            block="gau",
            train_length=8,
            separate_qk=True,
            gamma_std=1.0,
        )

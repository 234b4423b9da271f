"""The gated attention unit against its formula; dropout. hf/test_llama_weights has attention."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from layers.written_out import rotate
from normattn.layers.attention import Attention
from normattn.layers.gau import GatedAttentionUnit


def test_attention_weights_drop_only_in_training() -> None:
    torch.manual_seed(0)
    layer, x = Attention(16, 4, dropout=0.5), torch.randn(2, 7, 16)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


WIDTH, KEY, VALUE = 6, 8, 12


def _gated(unit: GatedAttentionUnit, x: Tensor, normalise_keys: bool) -> Tensor:
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
    unit = GatedAttentionUnit(WIDTH, KEY, score=score, **options).double()
    with torch.no_grad():
        if unit.gamma is not None:
            unit.gamma.normal_()
        if unit.beta is not None:
            unit.beta.normal_()
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    expected = _gated(unit, x, normalise_keys=score == "KNA")
    torch.testing.assert_close(unit(x), expected, rtol=0, atol=1e-7)
    wanted = [x, *unit.parameters()]
    ours = torch.autograd.grad(unit(x).sin().sum(), wanted)
    torch.testing.assert_close(
        ours, torch.autograd.grad(expected.sin().sum(), wanted), rtol=0, atol=1e-6
    )


def test_the_clip_of_separate_projections_scales_the_logits() -> None:
    """q·k is multiplied by the factor, and nothing else changes."""
    torch.manual_seed(0)
    unit = GatedAttentionUnit(WIDTH, KEY, separate_qk=True, bias=True).double()
    x = torch.randn(1, 5, WIDTH, dtype=torch.float64)
    q, k, v, u = unit.operands(x)
    unit.shrink(torch.tensor([0.25], dtype=torch.float64))
    smaller_q, smaller_k, same_v, same_u = unit.operands(x)
    torch.testing.assert_close(smaller_q @ smaller_k.mT, 0.25 * q @ k.mT)
    torch.testing.assert_close((same_v, same_u), (v, u))

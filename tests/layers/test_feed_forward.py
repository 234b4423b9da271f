"""Feed-forward layers against their formulas."""

from __future__ import annotations

import pytest
import torch

from normattn.layers.feed_forward import GELU, SwiGLU, swiglu_hidden


def test_swiglu_is_its_formula_with_gradients() -> None:
    torch.manual_seed(0)
    layer = SwiGLU(6, hidden=10).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    gate = x @ layer.up.weight[:10].T
    up = x @ layer.up.weight[10:].T
    expected = (gate / (1 + torch.exp(-gate)) * up) @ layer.down.weight.T
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-14)
    wanted = [x, *layer.parameters()]
    ours = torch.autograd.grad(layer(x).sin().sum(), wanted)
    torch.testing.assert_close(
        ours, torch.autograd.grad(expected.sin().sum(), wanted), rtol=0, atol=1e-13
    )


def test_gelu_is_its_formula() -> None:
    torch.manual_seed(0)
    layer = GELU(6).double()
    assert layer.hidden == 24
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    inner = x @ layer.up.weight.T
    inner = 0.5 * inner * (1 + torch.erf(inner / 2**0.5))
    torch.testing.assert_close(layer(x), inner @ layer.down.weight.T, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("dim", "hidden"), [(768, 2048), (256, 688), (128, 336), (2, 16)])
def test_swiglus_default_width(dim: int, hidden: int) -> None:
    assert swiglu_hidden(dim) == hidden
    assert SwiGLU(dim).hidden == hidden

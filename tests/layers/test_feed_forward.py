"""Feed-forward layers against their formulas."""

from __future__ import annotations

import pytest
import torch

from normattn.layers.feed_forward import GELU, SwiGLU, swiglu_hidden


def test_swiglu_is_its_formula_with_gradients() -> None:
    torch.manual_seed(0)
    layer = SwiGLU(6, hidden=10, bias=True).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    gate = x @ layer.up.weight[:10].T + layer.up.bias[:10]
    up = x @ layer.up.weight[10:].T + layer.up.bias[10:]
    expected = (gate / (1 + torch.exp(-gate)) * up) @ layer.down.weight.T + layer.down.bias
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-14)
    wanted = [x, *layer.parameters()]
    ours = torch.autograd.grad(layer(x).sin().sum(), wanted)
    torch.testing.assert_close(
        ours, torch.autograd.grad(expected.sin().sum(), wanted), rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 511, 1024, 1600])
def test_without_gradient_swiglu_goes_by_parts_and_changes_nothing(
    rows: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    layer = SwiGLU(64, hidden=48).to(dtype)
    x = torch.randn(rows, 1, 64, dtype=dtype)
    sizes: list[int] = []
    layer.up.register_forward_hook(lambda module, given, made: sizes.append(made.shape[0]))
    whole = layer(x)
    with torch.no_grad():
        by_parts = layer(x)
    assert sizes == [rows, *{1024: [512, 512], 1600: [512, 512, 576]}.get(rows, [rows])]
    # Of bf16 and of other libraries nobody knows that they round a row alike among any others.
    close = 0.0 if dtype == torch.float32 and torch.backends.mkl.is_available() else 1e-2  # type: ignore[no-untyped-call]
    torch.testing.assert_close(by_parts, whole, rtol=close, atol=close)


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

"""Norms against torch.nn in float64 and against their formulas."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.layers.norms import LayerNorm, RMSNorm


def _input(dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (3 * torch.randn(2, 5, 12, generator=generator, dtype=torch.float64) + 1).to(dtype)


def _draw_parameters(*modules: nn.Module) -> None:
    """The same random parameters, in order, in every module."""
    for module in modules:
        generator = torch.Generator().manual_seed(1)
        for parameter in module.parameters():
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def _gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = module(x)
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)
    return list(torch.autograd.grad((y * weights).sum(), [x, *module.parameters()]))


def test_layer_norm_is_torchs_in_float64() -> None:
    ours = LayerNorm(12, eps=1e-3).double()
    oracle = nn.LayerNorm(12, eps=1e-3).double()
    _draw_parameters(ours, oracle)
    x = _input()
    torch.testing.assert_close(ours(x), oracle(x), rtol=0, atol=1e-14)
    for mine, theirs in zip(_gradients(ours, x), _gradients(oracle, x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_layer_norm_divides_by_the_biased_variance() -> None:
    x = _input()
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().sum(-1, keepdim=True) / 12 + 1e-6).sqrt()
    torch.testing.assert_close(LayerNorm(12, gain=False, bias=False)(x), expected)


@pytest.mark.parametrize("gain", [True, False])
def test_rms_norm_is_torchs_in_float64_with_gradients(gain: bool) -> None:
    ours = RMSNorm(12, eps=1e-2, gain=gain).double()
    oracle = nn.RMSNorm(12, eps=1e-2, elementwise_affine=gain).double()
    _draw_parameters(ours, oracle)
    x = _input()
    torch.testing.assert_close(ours(x), oracle(x), rtol=0, atol=1e-14)
    for mine, theirs in zip(_gradients(ours, x), _gradients(oracle, x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_a_frozen_gain_gets_no_gradient_and_the_input_still_does() -> None:
    norm = RMSNorm(12).double()
    assert norm.gain is not None
    norm.gain.requires_grad_(False)
    x = _input().requires_grad_()
    norm(x).square().sum().backward()
    assert norm.gain.grad is None
    assert x.grad is not None


def test_eps_outside_is_added_to_the_root() -> None:
    x = _input() * 1e-3
    root = x.square().mean(-1, keepdim=True).sqrt()
    norm = RMSNorm(12, eps=0.1, gain=False, eps_placement="outside")
    torch.testing.assert_close(norm(x), x / (root + 0.1), rtol=1e-12, atol=0)
    inside = RMSNorm(12, eps=0.1, gain=False)
    torch.testing.assert_close(inside(x), x / (root.square() + 0.1).sqrt(), rtol=1e-12, atol=0)
    assert (norm(x) - inside(x)).abs().max() > 1e-3


@pytest.mark.parametrize("placement", ["inside", "outside"])
def test_a_zero_vector_gives_zero_and_finite_gradients(placement: str) -> None:
    x = torch.zeros(1, 12, requires_grad=True)
    y = RMSNorm(12, eps_placement=placement)(x)  # type: ignore[arg-type]
    y.sum().backward()
    assert x.grad is not None
    assert y.abs().max() == 0
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_bfloat16_statistics_are_float32(kind: type[nn.Module]) -> None:
    norm = kind(12)
    x = _input(torch.bfloat16)
    y = norm(x)
    assert y.dtype == torch.bfloat16
    exact = norm.double()(x.double())
    # Half a unit in the last of bfloat16's 8 bits: only the result has been rounded.
    assert ((y.double() - exact).abs() <= exact.abs() * 2.0**-8 + 1e-6).all()


def test_float16_rows_that_overflow_when_squared_stay_finite() -> None:
    x = torch.full((1, 12), 1000.0, dtype=torch.float16)
    torch.testing.assert_close(RMSNorm(12)(x), torch.ones_like(x))


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_impossible_settings_are_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(InputError, match="width must be at least 1"):
        kind(0)
    with pytest.raises(InputError, match="eps is -1"):
        kind(4, eps=-1.0)


def test_an_unknown_eps_placement_is_refused() -> None:
    # With the shapes' checker switched on, its own error comes first.
    with pytest.raises((InputError, TypeCheckError), match="'inside'"):
        RMSNorm(4, eps_placement="between")  # type: ignore[arg-type]

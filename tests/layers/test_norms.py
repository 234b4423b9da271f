"""LayerNorm and RMSNorm against torch.nn, in every precision; DyT and Derf by their equations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normattn import InputError
from normattn.layers.feed_forward import GELU, SwiGLU
from normattn.layers.norms import Derf, DyT, LayerNorm, RMSNorm
from normattn.models import CausalLM, CausalLMConfig
from normattn.score import norms as module

# In units of the last place: what rounding in another order may change.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 4e-6,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}


def pair(kind: str, dim: int, learned: bool, eps: float = 1e-5) -> tuple[nn.Module, nn.Module]:
    """Ours and torch's, with the same random parameters, in float64."""
    ours: nn.Module
    oracle: nn.Module
    if kind == "layer":
        ours = LayerNorm(dim, eps, gain=learned)
        oracle = nn.LayerNorm(dim, eps, elementwise_affine=learned)
    else:
        ours = RMSNorm(dim, eps, gain=learned)
        oracle = nn.RMSNorm(dim, eps, elementwise_affine=learned)
    generator = torch.Generator().manual_seed(1)
    for mine, theirs in zip(ours.parameters(), oracle.parameters(), strict=True):
        with torch.no_grad():
            mine.copy_(torch.randn(mine.shape, generator=generator))
            theirs.copy_(mine)
    return ours.double(), oracle.double()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(*shape, generator=generator, dtype=torch.float64) + 1


def everything(norm: nn.Module, x: Tensor, weight: Tensor) -> list[Tensor]:
    """The output, and the gradients of Σ weight·output in x and the parameters."""
    x = x.clone().requires_grad_()
    y = norm(x)
    assert y.dtype == x.dtype
    return [y.detach(), *torch.autograd.grad((y * weight).sum(), [x, *norm.parameters()])]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        scale = max(1.0, float(theirs.abs().max()))
        assert float((mine.double() - theirs.double()).abs().max()) <= tolerance * scale


@pytest.fixture(params=["whole", "chunks"])
def _by_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows all at once, or by chunks that do not divide them."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 1 << 30 if request.param == "whole" else 700)


@pytest.mark.usefixtures("_by_chunks")
@pytest.mark.parametrize("learned", [True, False], ids=["learned", "plain"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_equal_to_torch_in_every_precision(kind: str, dtype: torch.dtype, learned: bool) -> None:
    ours, oracle = pair(kind, 24, learned)
    x, weight = drawn(3, 11, 24).to(dtype), drawn(3, 11, 24, seed=1).to(dtype)
    ours, oracle = ours.to(dtype), oracle.to(dtype)
    # The truth for rounded inputs and parameters, in float64.
    exact = everything(oracle.double(), x.double(), weight.double())
    assert_close(everything(ours, x, weight), exact, TOLERANCE[dtype])


@pytest.mark.usefixtures("_by_chunks")
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_full_precision_parameters_serve_a_half_precision_stream(kind: str) -> None:
    ours, oracle = pair(kind, 24, True)
    x, weight = drawn(4, 9, 24).bfloat16(), drawn(4, 9, 24, seed=1).bfloat16()
    found = everything(ours.float(), x, weight)
    assert all(gradient.dtype == torch.float32 for gradient in found[2:])
    assert_close(found, everything(oracle, x.double(), weight.double()), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_gradients_of_parameters_are_added_up_in_float32(kind: str) -> None:
    # Added up in bfloat16, as torch's LayerNorm does on a CPU, they are off by several percent.
    ours, oracle = pair(kind, 40, True)
    x, weight = drawn(4000, 40).bfloat16(), drawn(4000, 40, seed=1).bfloat16()
    found = everything(ours.float(), x, weight)
    assert_close(found[2:], everything(oracle, x.double(), weight.double())[2:], 1e-5)


@pytest.mark.usefixtures("_by_chunks")
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_strided_rows_and_gradients_give_what_contiguous_ones_do(kind: str) -> None:
    ours, oracle = pair(kind, 8, True)
    x, weight = drawn(2, 8, 5).transpose(1, 2), drawn(5, 2, 8, seed=1).transpose(0, 1)
    assert not x.is_contiguous()
    assert_close(everything(ours, x, weight), everything(oracle, x, weight), 1e-12)


@pytest.mark.usefixtures("_by_chunks")
@pytest.mark.parametrize("learned", [True, False], ids=["learned", "plain"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_first_and_second_derivatives_by_finite_differences(kind: str, learned: bool) -> None:
    ours, _ = pair(kind, 6, learned, eps=1e-2)
    x = drawn(7, 6).requires_grad_()
    names = [name for name, _ in ours.named_parameters()]

    def call(x: Tensor, *parameters: Tensor) -> Tensor:
        given = dict(zip(names, parameters, strict=True))
        y: Tensor = torch.func.functional_call(ours, given, (x,))
        return y

    inputs = (x, *(p.detach().clone().requires_grad_() for p in ours.parameters()))
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize(
    "layer", [LayerNorm(8), RMSNorm(8, gain=False), DyT(8), Derf(8), SwiGLU(8), GELU(8)], ids=str
)
def test_another_width_is_refused(layer: nn.Module) -> None:
    for x in (torch.ones(2, 3, 16), torch.ones(2, 1), torch.ones(2, 8, dtype=torch.long)):
        with pytest.raises(InputError, match="input must be"):
            layer(x)
    assert layer(torch.ones(0, 8)).shape == (0, 8)


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
    expected = (alpha * x.detach() + shift).apply_(squash) * gain + bias
    torch.testing.assert_close(norm(x), expected)
    assert torch.autograd.gradcheck(norm, x)


@pytest.mark.parametrize(
    ("changes", "senseless"),
    [
        ({"norm": "dyt"}, {"norm_eps": 1e-5}),
        ({"norm": "derf"}, {"norm_eps": 1e-5}),
        ({"placement": "nGPT", "score": "NGPT-RotateFirst"}, {"norm_gain": False}),
    ],
)
def test_a_model_of_other_norms_learns_and_reads_on(
    changes: dict[str, Any], senseless: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 11, "dim": 16, "layers": 2, "heads": 2, **changes}
    model = CausalLM(CausalLMConfig(**sizes, train_length=8))
    ids = torch.randint(0, 11, (4, 8))
    model.loss(ids).loss.backward()  # type: ignore[no-untyped-call]
    still = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()]
    assert still == []
    model.eval()
    cache = model.new_cache()
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in torch.split(ids, [3, 1, 4], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(ids), rtol=1e-4, atol=1e-4)
    (setting,) = senseless
    with pytest.raises(InputError, match=f"{setting} has no meaning"):
        CausalLMConfig(**sizes, train_length=8, **senseless)

"""Norms, feed-forward layers, the gated unit and residual placements against their equations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from layers.written_out import rotate
from normattn import InputError
from normattn.layers import NGPT, AttnRes, DeepNorm, PostLN, PreLN, ReZero, deepnorm_factors
from normattn.layers.attention import Attention
from normattn.layers.feed_forward import GELU, SwiGLU, swiglu_hidden
from normattn.layers.gau import GatedAttentionUnit
from normattn.layers.norms import Derf, DyT, LayerNorm, RMSNorm
from normattn.layers.residual import LayerOutputs
from normattn.models import CausalLMConfig
from normattn.score import norms as module

# Of the input and of the parameters; and what rounding in another order may change.
PRECISIONS = {
    (torch.float64, torch.float64): 1e-12,
    (torch.float32, torch.float32): 4e-6,
    (torch.bfloat16, torch.bfloat16): 2.0**-8,
    (torch.float16, torch.float16): 2.0**-11,
    (torch.bfloat16, torch.float32): 2.0**-8,
}
KINDS = {"layer": (LayerNorm, nn.LayerNorm), "rms": (RMSNorm, nn.RMSNorm)}
every_kind = pytest.mark.parametrize("kind", KINDS)


def pair(kind: str, dim: int, learned: bool, eps: float = 1e-5) -> tuple[nn.Module, nn.Module]:
    """Ours and torch's, with the same random parameters, in float64."""
    own, known = KINDS[kind]
    ours = own(dim, eps, gain=learned).double()
    oracle = known(dim, eps, elementwise_affine=learned).double()
    generator = torch.Generator().manual_seed(1)
    for mine, theirs in zip(ours.parameters(), oracle.parameters(), strict=True):
        with torch.no_grad():
            mine.copy_(torch.randn(mine.shape, generator=generator))
            theirs.copy_(mine)
    return ours, oracle


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
@pytest.mark.parametrize("dtypes", PRECISIONS, ids=str)
@every_kind
def test_equal_to_torch_in_every_precision(kind: str, dtypes: Any, learned: bool) -> None:
    """The truth is that of rounded inputs and parameters in float64; rows may lie anyhow."""
    stream, own = dtypes
    ours, oracle = pair(kind, 24, learned)
    x, weight = drawn(3, 24, 11).mT.to(stream), drawn(11, 3, 24, seed=1).transpose(0, 1).to(stream)
    x = x.contiguous() if learned else x
    ours, oracle = ours.to(own), oracle.to(own).double()
    found, exact = everything(ours, x, weight), everything(oracle, x.double(), weight.double())
    assert_close(found, exact, PRECISIONS[dtypes])


@every_kind
def test_gradients_of_parameters_are_added_up_in_float32(kind: str) -> None:
    """Added up in bfloat16, as torch's LayerNorm does on a CPU, they are off by several percent."""
    ours, oracle = pair(kind, 40, True)
    x, weight = drawn(4000, 40).bfloat16(), drawn(4000, 40, seed=1).bfloat16()
    found = everything(ours.float(), x, weight)
    assert_close(found[2:], everything(oracle, x.double(), weight.double())[2:], 1e-5)


@pytest.mark.usefixtures("_by_chunks")
@pytest.mark.parametrize("learned", [True, False], ids=["learned", "plain"])
@every_kind
def test_first_and_second_derivatives_by_finite_differences(kind: str, learned: bool) -> None:
    ours, _ = pair(kind, 6, learned, eps=1e-2)
    names = [name for name, _ in ours.named_parameters()]

    def call(x: Tensor, *parameters: Tensor) -> Tensor:
        given = dict(zip(names, parameters, strict=True))
        y: Tensor = torch.func.functional_call(ours, given, (x,))
        return y

    inputs = (drawn(7, 6).requires_grad_(), *ours.parameters())
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
    given, leaves = dict(norm.named_parameters()), [x, *norm.parameters()]
    inner = given["alpha"] * x + given.get("shift", 0.0)
    expected = (inner.erf() if kind is Derf else inner.tanh()) * given["gain"] + given["bias"]
    torch.testing.assert_close(norm(x), expected)
    outs = norm(x), expected
    grads = [torch.autograd.grad(out.sin().sum(), leaves) for out in outs]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("changes", "senseless"),
    [
        ({"norm": "dyt"}, "norm_eps"),
        ({"norm": "derf"}, "norm_eps"),
        ({"placement": "nGPT", "score": "NGPT-RotateFirst"}, "norm_gain"),
    ],
)
def test_what_other_norms_do_not_have_is_refused(changes: dict[str, Any], senseless: str) -> None:
    sizes: dict[str, Any] = {"vocab_size": 11, "dim": 16, "layers": 2, "heads": 2, **changes}
    sizes[senseless] = 0.0
    with pytest.raises(InputError, match=f"{senseless} has no meaning"):
        CausalLMConfig(**sizes, train_length=8)


WIDTH, KEY, VALUE = 6, 8, 12


def _swiglu(layer: SwiGLU, x: Tensor) -> Tensor:
    gate, up = (x @ weight.T for weight in layer.up.weight.chunk(2))
    return (gate / (1 + torch.exp(-gate)) * up) @ layer.down.weight.T


def _gelu(layer: GELU, x: Tensor) -> Tensor:
    inner = x @ layer.up.weight.T
    return (0.5 * inner * (1 + torch.erf(inner / 2**0.5))) @ layer.down.weight.T


def _gated(unit: GatedAttentionUnit, x: Tensor) -> Tensor:
    linear = x @ unit.expand.weight.T
    inner = linear / (1 + torch.exp(-linear))
    u, v, z = inner[..., :VALUE], inner[..., VALUE : 2 * VALUE], inner[..., 2 * VALUE :]
    if unit.gamma is None:
        q, k = linear[..., 2 * VALUE :].chunk(2, -1)
    else:
        q, k = z * unit.gamma[0], z * unit.gamma[1]
    if unit.beta is not None:
        q, k = q + unit.beta[0], k + unit.beta[1]
    normalised = unit.score.spec.name == "KNA"
    k = F.normalize(k, dim=-1) if normalised else k
    s = rotate(q) @ rotate(k).transpose(1, 2) / (1 if normalised else math.sqrt(KEY))
    s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -math.inf)
    return (u * (s.softmax(-1) @ v)) @ unit.out.weight.T


UNITS = [
    GatedAttentionUnit(WIDTH, KEY, score=score, **options)
    for score in ("Baseline", "KNA")
    for options in ({}, {"offset": True}, {"separate_qk": True})
]
LAYERS = [(SwiGLU(WIDTH, hidden=10), _swiglu), (GELU(WIDTH), _gelu), *((u, _gated) for u in UNITS)]


@pytest.mark.parametrize(("layer", "formula"), LAYERS)
def test_a_layer_is_its_formula(layer: nn.Module, formula: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    layer.double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    outs, wanted = (layer(x), formula(layer, x)), [x, *layer.parameters()]
    torch.testing.assert_close(*outs, rtol=0, atol=1e-7)
    grads = [torch.autograd.grad(out.sin().sum(), wanted) for out in outs]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("dim", "hidden"), [(768, 2048), (256, 688), (128, 336), (2, 16)])
def test_default_widths(dim: int, hidden: int) -> None:
    assert swiglu_hidden(dim) == SwiGLU(dim).hidden == hidden
    assert GELU(dim).hidden == 4 * dim


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


def test_attention_weights_drop_only_in_training() -> None:
    torch.manual_seed(0)
    layer, x = Attention(16, 4, dropout=0.5), torch.randn(2, 7, 16)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


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

    ours = X.clone().requires_grad_()
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
    torch.testing.assert_close(placed.alpha * 0.05 * dim**0.5, torch.full((dim,), 0.05).double())
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


@pytest.mark.parametrize(
    ("blocks", "sublayers", "alpha", "beta"),
    [
        # The paper's table: (2N)^¼ and (8N)^−¼ for N = 18 blocks of two; one sub-layer a block.
        (18, 2, 36**0.25, 144**-0.25),
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

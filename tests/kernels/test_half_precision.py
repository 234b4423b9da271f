"""Half precision: no kernel rounds a score to it; and autocast changes no score."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from normattn import attention
from normattn.kernels import AttentionInputs, AttentionMask, attend
from normattn.kernels.dispatch import KERNELS
from normattn.kernels.numerics import finite, spread_infinities
from normattn.kernels.reference import reference

B, H, G, S, D = 1, 2, 1, 150, 16
KINDS = ("plain", "far", "bias", "sink", "cap", "window")


def _problem(kind: str, dtype: torch.dtype) -> AttentionInputs:
    """Logits of about ± 40."""
    seed = torch.Generator().manual_seed(0)

    def drawn(heads: int, size: float = 1.0) -> Tensor:
        return (torch.randn((B, heads, S, D), generator=seed) * size).to(dtype).requires_grad_()

    key = torch.arange(S)
    seen = AttentionMask(True, key, key, True, window=20 if kind == "window" else None)
    q, k, v = drawn(H, 5.0), drawn(G), drawn(G)
    far: dict[str, Any] = {}
    if kind == "far":
        far = dict(zip(("far_q", "far_k", "window"), (drawn(H, 5.0), drawn(G), 12), strict=True))
    bias = -torch.rand(H, S, generator=seed) if kind == "bias" else None
    sink = torch.zeros(H) if kind == "sink" else None
    cap = 100.0 if kind == "cap" else None
    return AttentionInputs(q, k, v, seen, bias=bias, sink=sink, cap=cap, **far)


def _off(problem: AttentionInputs, backend: str) -> tuple[float, float]:
    """The largest errors of the output and of the gradients, against float64."""
    leaves = [x for x in problem.tensors if x is not None and x.requires_grad]
    wide = [None if x is None else x.detach().double().requires_grad_() for x in problem.tensors]
    exact = reference(AttentionInputs.of(problem.settings, wide))
    out = attend(problem, backend)
    grads = torch.autograd.grad(out.sum(), leaves)
    wanted = [x for x in wide if x is not None][: len(leaves)]
    hand = torch.autograd.grad(exact.sum(), wanted)
    errors = [
        float((mine.detach().double() - other).abs().max() / other.abs().max())
        for mine, other in zip((out, *grads), (exact, *hand), strict=True)
    ]
    return errors[0], max(errors[1:])


def _serving(problem: AttentionInputs) -> list[str]:
    """The kernels that serve it with gradients."""
    return ["auto", *(kernel.name for kernel in KERNELS if kernel.why_not(problem) is None)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kernel_keeps_scores_in_float32(kind: str, dtype: torch.dtype) -> None:
    """Weights and results may be rounded, as torch's own kernel does; a score is not."""
    problem = _problem(kind, dtype)
    served = _serving(problem)
    assert {"chunked", "strips", "reference"} < set(served)
    for kernel in served:
        assert attend(problem, kernel).dtype == dtype
        out, grads = _off(problem, kernel)
        assert out < 1.5 * torch.finfo(dtype).eps, kernel
        assert grads < 1.5 * torch.finfo(dtype).eps, kernel


def _grown(kind: str, largest: float) -> AttentionInputs:
    """The same in float16 with logits of up to about `largest`, and without a cap."""
    problem = _problem(kind, torch.float16)
    q, k = problem.q.detach().double(), problem.k.detach().double()
    factor = (largest / (q @ k.mT).abs().max()).sqrt()
    q, k = ((x * factor).half().requires_grad_() for x in (q, k))
    grown = replace(problem, q=q, k=k, cap=None)
    if problem.far_q is None or problem.far_k is None:
        return grown
    far_q, far_k = (x.detach() * factor.half() for x in (problem.far_q, problem.far_k))
    return replace(grown, far_q=far_q.requires_grad_(), far_k=far_k.requires_grad_())


@pytest.mark.parametrize("kind", KINDS)
def test_logits_in_the_thousands(kind: str) -> None:
    """A score of 8,600 would be rounded to a multiple of 8 in float16."""
    problem = _grown(kind, 8600.0)
    for kernel in _serving(problem):
        out, grads = _off(problem, kernel)
        assert out < 1e-3, kernel
        assert grads < 4e-3, kernel


@pytest.mark.parametrize("kind", KINDS)
def test_logits_beyond_float16(kind: str) -> None:
    """Of more than 65,504, forward and backward."""
    problem = _grown(kind, 500_000.0)
    for kernel in _serving(problem):
        assert _off(problem, kernel)[0] < 2e-2, kernel
        leaves = [x for x in problem.tensors if x is not None and x.requires_grad]
        grads = torch.autograd.grad(attend(problem, kernel).sum(), leaves)
        assert all(grad.isfinite().all() for grad in grads), kernel


@pytest.mark.parametrize("kernel", ["fused", "chunked", "strips", "reference"])
def test_a_sum_beyond_float16_is_no_infinity(kernel: str) -> None:
    """70,000 ones are finite; the asked kernel computes them."""
    ones = torch.ones(1, 2, 600, 64, dtype=torch.float16)
    assert not ones.sum().isfinite()
    key = torch.arange(600)
    problem = AttentionInputs(ones, ones, ones, AttentionMask(True, key, key, True))
    assert finite(ones)
    assert spread_infinities(problem) is problem
    assert torch.equal(attend(problem, kernel), ones)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_is_not_finite_is_found(value: float, dtype: torch.dtype) -> None:
    x = torch.full((1, 2, 600, 64), 300.0, dtype=dtype)
    x[0, 1, 17, 3] = value
    assert not finite(x)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_leaves_float32_tensors_alone(kind: str) -> None:
    problem = _problem(kind, torch.float32)
    for kernel in KERNELS:
        if kernel.why_not(problem) is not None:
            continue
        plain = attend(problem, kernel.name)
        with torch.autocast("cpu", torch.bfloat16):
            under = attend(problem, kernel.name)
        assert under.dtype == torch.float32, kernel.name
        assert torch.equal(plain, under), kernel.name


def test_every_score_in_half_precision() -> None:
    seed = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((1, 2, 40, 8), generator=seed).bfloat16() for _ in range(3))
    for score in (
        "KNA-logn@8",
        "Baseline-ALiBi",
        "Baseline-ReRoPE(window=5)",
        "CosA-DynamicNTK@16",
    ):
        exact = attention(q.double(), k.double(), v.double(), score)
        out = attention(q, k, v, score)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)

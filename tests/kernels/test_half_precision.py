"""`backend="precise"`: no score is rounded to half precision; and autocast changes no score."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from normattn import attention
from normattn.kernels import Problem, Visibility, attend
from normattn.kernels.dispatch import KERNELS
from normattn.kernels.reference import reference

B, H, G, S, D = 1, 2, 1, 150, 16
KINDS = ("plain", "far", "bias", "sink", "cap", "window")


def _problem(kind: str, dtype: torch.dtype) -> Problem:
    """Logits of about ± 40."""
    seed = torch.Generator().manual_seed(0)

    def drawn(heads: int, size: float = 1.0) -> Tensor:
        return (torch.randn((B, heads, S, D), generator=seed) * size).to(dtype).requires_grad_()

    key = torch.arange(S)
    seen = Visibility(True, key, key, True, window=20 if kind == "window" else None)
    q, k, v = drawn(H, 5.0), drawn(G), drawn(G)
    far: dict[str, Any] = {}
    if kind == "far":
        far = dict(zip(("far_q", "far_k", "window"), (drawn(H, 5.0), drawn(G), 12), strict=True))
    bias = -torch.rand(H, S, generator=seed) if kind == "bias" else None
    sink = torch.zeros(H) if kind == "sink" else None
    cap = 100.0 if kind == "cap" else None
    return Problem(q, k, v, seen, bias=bias, sink=sink, cap=cap, **far)


def _off(problem: Problem, backend: str) -> tuple[float, float]:
    """The largest errors of the output and of the gradients, against float64."""
    leaves = [x for x in problem.tensors if x is not None and x.requires_grad]
    wide = [None if x is None else x.detach().double().requires_grad_() for x in problem.tensors]
    exact = reference(Problem.of(problem.settings, wide))
    out = attend(problem, backend)
    grads = torch.autograd.grad(out.sum(), leaves)
    wanted = [x for x in wide if x is not None][: len(leaves)]
    hand = torch.autograd.grad(exact.sum(), wanted)
    errors = [
        float((mine.detach().double() - other).abs().max() / other.abs().max())
        for mine, other in zip((out, *grads), (exact, *hand), strict=True)
    ]
    return errors[0], max(errors[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_stay_in_float32(kind: str, dtype: torch.dtype) -> None:
    problem = _problem(kind, dtype)
    assert attend(problem, "precise").dtype == dtype
    out, grads = _off(problem, "precise")
    # Nothing but the result itself is rounded.
    assert out < torch.finfo(dtype).eps
    assert grads < torch.finfo(dtype).eps
    if dtype == torch.bfloat16:
        assert _off(problem, "chunked")[0] > 2 * out, "tiles round scores: else this shows nothing"


@pytest.mark.parametrize("kernel", ["two-regime", "two-regime-flash"])
def test_two_regimes_round_no_score(kernel: str) -> None:
    """What the stock kernel reads in half precision: its weights are rounded, no score is."""
    problem = _problem("far", torch.bfloat16)
    assert attend(problem, kernel).dtype == torch.bfloat16
    out, grads = _off(problem, kernel)
    assert out < 1.5 * torch.finfo(torch.bfloat16).eps
    assert grads < 1.5 * torch.finfo(torch.bfloat16).eps
    assert _off(problem, "chunked")[0] > 2 * out


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


def test_precise_is_for_every_score() -> None:
    seed = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((1, 2, 40, 8), generator=seed).bfloat16() for _ in range(3))
    for score in (
        "KNA-logn@8",
        "Baseline-ALiBi",
        "Baseline-ReRoPE(window=5)",
        "CosA-DynamicNTK@16",
    ):
        exact = attention(q.double(), k.double(), v.double(), score)
        out = attention(q, k, v, score, backend="precise")
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)


def test_a_problem_in_float32_is_served_as_ever() -> None:
    problem = _problem("far", torch.float32)
    assert torch.equal(attend(problem, "precise"), attend(replace(problem)))

"""Half precision: no kernel rounds a score to it; and autocast changes no score."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from normattn.kernels import AttentionInputs, attend
from normattn.kernels.dispatch import KERNELS
from normattn.kernels.numerics import finite
from normattn.kernels.reference import reference

from .problems import CHANGES, in_float64, leaves_of, make_inputs, outputs_and_gradients

S = 150
changes = pytest.mark.parametrize("change", [*CHANGES[:-1], "window"])


def _inputs(change: str, dtype: torch.dtype, largest: float = 40.0) -> AttentionInputs:
    """Logits of up to about ± `largest`."""
    shape: dict[str, Any] = {"batch": 1, "heads": 2, "groups": 1, "size": 16}
    seen: dict[str, Any] = {"window": 20} if change == "window" else {}
    inputs = make_inputs(S, S, change.replace("window", "plain"), far_from=12, **shape, **seen)
    factor = (largest / (inputs.q @ inputs.k.mT).abs().max()).sqrt()
    grown = {
        name: (x.detach() * factor if name in ("q", "k", "far_q", "far_k") else x.detach())
        for name in ("q", "k", "v", "far_q", "far_k")
        if (x := getattr(inputs, name)) is not None
    }
    grown = {name: x.to(dtype).requires_grad_() for name, x in grown.items()}
    learned = {
        name: getattr(inputs, name).detach().to(torch.float32)
        for name in ("bias", "sink")
        if getattr(inputs, name) is not None
    }
    cap = None if inputs.cap is None else 2.5 * largest
    return replace(inputs, **grown, **learned, cap=cap)


def _errors(inputs: AttentionInputs, backend: str) -> tuple[float, float]:
    """The largest errors of the output and of the gradients, against float64."""
    exact = in_float64(inputs)
    fixed = {name: getattr(exact, name) for name in ("bias", "sink")}
    fixed = {name: x.detach() for name, x in fixed.items() if x is not None}
    expected = outputs_and_gradients(reference, replace(exact, **fixed))
    ours = outputs_and_gradients(lambda p: attend(p, backend), inputs)
    errors = [
        float((mine.detach().double() - other).abs().max() / other.abs().max())
        for mine, other in zip(ours, expected, strict=True)
    ]
    return errors[0], max(errors[1:])


def _serving(inputs: AttentionInputs) -> list[str]:
    """The kernels that serve it with gradients."""
    return ["auto", *(kernel.name for kernel in KERNELS if kernel.why_not(inputs) is None)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@changes
def test_every_kernel_keeps_scores_in_float32(change: str, dtype: torch.dtype) -> None:
    """Weights and results may be rounded, as torch's own kernel does; a score is not."""
    inputs = _inputs(change, dtype)
    served = _serving(inputs)
    assert {"chunked", "strips", "reference"} < set(served)
    for kernel in served:
        assert attend(inputs, kernel).dtype == dtype
        out, grads = _errors(inputs, kernel)
        assert out < 1.5 * torch.finfo(dtype).eps, kernel
        assert grads < 1.5 * torch.finfo(dtype).eps, kernel


@changes
def test_logits_in_the_thousands(change: str) -> None:
    """A score of 8,600 would be rounded to a multiple of 8 in float16."""
    inputs = replace(_inputs(change, torch.float16, 8600.0), cap=None)
    for kernel in _serving(inputs):
        out, grads = _errors(inputs, kernel)
        assert out < 1e-3, kernel
        assert grads < 4e-3, kernel


@changes
def test_logits_beyond_float16(change: str) -> None:
    """Of more than 65,504, forward and backward."""
    inputs = replace(_inputs(change, torch.float16, 500_000.0), cap=None)
    for kernel in _serving(inputs):
        assert _errors(inputs, kernel)[0] < 2e-2, kernel
        grads = torch.autograd.grad(attend(inputs, kernel).sum(), leaves_of(inputs))
        assert all(grad.isfinite().all() for grad in grads), kernel


@pytest.mark.parametrize("kernel", ["fused", "chunked", "strips", "reference"])
def test_a_sum_beyond_float16_is_no_infinity(kernel: str) -> None:
    """70,000 ones are finite; the named kernel computes them."""
    ones = torch.ones(1, 2, 600, 64, dtype=torch.float16)
    assert not ones.sum().isfinite()
    assert finite(ones)
    inputs = replace(make_inputs(600, 600), q=ones, k=ones, v=ones)
    assert torch.equal(attend(inputs, kernel), ones)


@changes
def test_autocast_leaves_float32_tensors_alone(change: str) -> None:
    inputs = _inputs(change, torch.float32)
    for kernel in _serving(inputs)[1:]:
        plain = attend(inputs, kernel)
        with torch.autocast("cpu", torch.bfloat16):
            under = attend(inputs, kernel)
        assert under.dtype == torch.float32, kernel
        assert torch.equal(plain, under), kernel

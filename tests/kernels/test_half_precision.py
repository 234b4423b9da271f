"""Half precision: no kernel rounds a score to it; autocast; subnormal weights count as 0."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from normattn import InputError, attention
from normattn.kernels import AttentionInputs, attend
from normattn.kernels.dispatch import KERNELS
from normattn.kernels.numerics import finite, flushes, flushing
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
    changed = {}
    for name in ("q", "k", "v", "far_q", "far_k", "bias", "sink"):
        if (x := getattr(inputs, name)) is None:
            continue
        if name in ("bias", "sink"):
            changed[name] = x.detach().float()
        else:
            grown = x.detach() * (1 if name == "v" else factor)
            changed[name] = grown.to(dtype).requires_grad_()
    return replace(inputs, **changed, cap=None if inputs.cap is None else 2.5 * largest)


def _errors(inputs: AttentionInputs, backend: str) -> tuple[float, float]:
    """The largest errors of the output and of the gradients, against float64."""
    exact = in_float64(inputs)
    bias, sink = (None if x is None else x.detach() for x in (exact.bias, exact.sink))
    expected = outputs_and_gradients(reference, replace(exact, bias=bias, sink=sink))
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
def test_logits_in_the_thousands_and_beyond_float16(change: str) -> None:
    """A score of 8,600 would be rounded to a multiple of 8 in float16, whose largest is 65,504."""
    large, beyond = (_inputs(change, torch.float16, most) for most in (8600.0, 500_000.0))
    large, beyond = replace(large, cap=None), replace(beyond, cap=None)
    for kernel in _serving(large):
        out, grads = _errors(large, kernel)
        assert out < 1e-3, kernel
        assert grads < 4e-3, kernel
        assert _errors(beyond, kernel)[0] < 2e-2, kernel
        found = torch.autograd.grad(attend(beyond, kernel).sum(), leaves_of(beyond))
        assert all(grad.isfinite().all() for grad in found), kernel


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


def test_subnormal_numbers_count_as_0_inside_alone() -> None:
    assert flushing(flushes)()
    assert not flushes()

    @flushing
    def failing() -> None:
        raise InputError("no")

    with pytest.raises(InputError, match="no"):
        failing()
    assert not flushes()


def test_only_what_is_below_every_normal_number_is_lost() -> None:
    """Steep biases: weights down to exp(-100), whose sums are those of the reference."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 700, 16, requires_grad=True) for _ in range(3))
    made = []
    for kernel in ("chunked", "reference"):
        out = attention(q, k, v, "Baseline-ALiBi", backend=kernel)
        made.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        assert not flushes()
    torch.testing.assert_close(*made, rtol=1e-4, atol=2e-4)

"""Subnormal weights count as 0 inside a kernel, and nothing changes outside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from normattn import attention
from normattn.errors import InputError
from normattn.kernels.numerics import flushes, flushing


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    torch.set_flush_denormal(False)


def test_it_holds_inside_alone() -> None:
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

"""A bias by distance in the tiles, against the float64 definition: outputs and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from normattn.kernels import AttentionInputs, AttentionMask, attend, tiled
from normattn.kernels.reference import reference

from .memory import largest
from .problems import assert_all_close, in_float64, leaves_of, make_inputs, outputs_and_gradients

SHAPE: dict[str, Any] = {"batch": 1, "heads": 2, "groups": 2, "size": 4, "values": 5}
pytestmark = pytest.mark.usefixtures("small_tiles")


def chunked(inputs: AttentionInputs) -> Tensor:
    return attend(inputs, "chunked")


@pytest.mark.parametrize(
    ("dtype", "causal", "groups", "error"),
    [(torch.float64, False, 1, 1e-11), (torch.float32, True, 3, 1e-5)],
)
def test_keys_beyond_a_heads_reach_are_left_out(
    dtype: torch.dtype, causal: bool, groups: int, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So steep a bias that far weights are 0: the same numbers from fewer products."""
    monkeypatch.setattr(tiled, "REACH_FROM", 1)
    monkeypatch.setattr(tiled, "TILE_BYTES", 1)
    shape, steep = {**SHAPE, "heads": 3, "groups": groups}, -20.0 * torch.arange(1, 4)[:, None]
    for rows in (30, 72):
        inputs = make_inputs(rows, 72, "bias", causal=causal, dtype=dtype, **shape)
        assert inputs.bias is not None
        bias = inputs.bias.detach().double() + steep * torch.arange(72)
        inputs = replace(inputs, bias=bias.requires_grad_())
        along = torch.linspace(-1, 1, 3 * rows * 5, dtype=torch.float64).view(1, 3, rows, 5)
        ours = outputs_and_gradients(chunked, inputs, along.to(dtype))
        exact = outputs_and_gradients(reference, in_float64(inputs), along)
        for one, other in zip(ours, exact, strict=True):
            assert one.isfinite().all()
            assert (one - other).norm() <= error * max(1.0, other.norm().item())
    few = _flops(inputs)
    monkeypatch.setattr(tiled, "REACH_FROM", 73)
    assert few < 0.8 * _flops(inputs)


def _flops(inputs: AttentionInputs) -> int:
    with FlopCounterMode(display=False) as counter:
        outputs_and_gradients(chunked, inputs)
    return int(counter.get_total_flops())


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.1, 60.0), st.floats(0.1, 4.0))
def test_keys_beyond_the_reach_change_nothing(seed: int, slope: float, spread: float) -> None:
    draw, key = torch.Generator().manual_seed(seed), torch.arange(600)
    q, k = (torch.randn(1, 2, 600, 4, generator=draw) * spread for _ in range(2))
    b = -slope * torch.arange(600.0) + torch.randn(2, 600, generator=draw)
    v = torch.randn(1, 2, 600, 4, generator=draw)
    inputs = AttentionInputs(q, k, v, AttentionMask(True, key, key, True), bias=b)
    torch.testing.assert_close(attend(inputs, "chunked"), reference(inputs), rtol=1e-4, atol=1e-4)


def test_a_fixed_bias_has_no_gradient_and_fixed_inputs_neither() -> None:
    inputs = make_inputs(19, 19, "bias", **SHAPE)
    assert inputs.bias is not None
    fixed = replace(inputs, bias=inputs.bias.detach())
    expected = outputs_and_gradients(reference, fixed)
    assert_all_close(outputs_and_gradients(chunked, fixed), expected)
    every = torch.autograd.grad(attend(inputs, "chunked").square().sum(), leaves_of(inputs))
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    alone = attend(replace(inputs, q=q, k=k, v=v), "chunked").square().sum()
    torch.testing.assert_close(torch.autograd.grad(alone, inputs.bias)[0], every[3])


def test_a_bias_may_hide_what_is_far() -> None:
    inputs = make_inputs(30, 30, "bias", **SHAPE)
    assert inputs.bias is not None
    b = inputs.bias.detach().clone()
    b[:, 5:] = -torch.inf
    hidden = replace(inputs, bias=b)
    torch.testing.assert_close(attend(hidden, "chunked"), reference(hidden), rtol=1e-11, atol=1e-12)


def test_no_matrix() -> None:
    """The largest tensors are a tile's scores, the bias of any tile, and its padded gradient."""
    one = {"dtype": torch.float32, **SHAPE, "heads": 1, "groups": 1}
    inputs = make_inputs(256, 256, "bias", **one)
    with largest() as record:
        outputs_and_gradients(chunked, inputs)
    assert record.numel <= 8 * (256 + 2 * 8)

"""A bias by distance in the tiles, against the float64 definition: outputs and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from normattn.kernels import AttentionInputs, AttentionMask, attend, tiled
from normattn.kernels.reference import reference

from .memory import largest
from .problems import assert_all_close, in_float64, leaves_of, make_inputs, outputs_and_gradients

TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5}
pytestmark = pytest.mark.usefixtures("small_tiles")


def biased(
    queries: int,
    keys: int | None = None,
    causal: bool = True,
    batch: int = 1,
    heads: int = 2,
    groups: int | None = None,
    dtype: torch.dtype = torch.float64,
    slope: float = 0.0,
) -> AttentionInputs:
    """A learned bias, falling by `slope` for each token of distance beside the noise."""
    keys = keys or queries
    shape: dict[str, Any] = {"batch": batch, "heads": heads, "groups": groups or heads}
    inputs = make_inputs(
        queries, keys, "bias", size=4, values=5, causal=causal, dtype=dtype, **shape
    )
    fall = torch.arange(1, heads + 1)[:, None] * slope * torch.arange(keys)
    assert inputs.bias is not None
    return replace(inputs, bias=(inputs.bias.detach().double() - fall).requires_grad_())


def assert_agrees(inputs: AttentionInputs) -> None:
    """Output and all gradients, by the norm of the difference."""
    exact, shape = in_float64(inputs), (*inputs.q.shape[:3], inputs.v.shape[3])
    along = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours = outputs_and_gradients(lambda p: attend(p, "chunked"), inputs, along.to(inputs.q.dtype))
    for one, other in zip(ours, outputs_and_gradients(reference, exact, along), strict=True):
        assert one.isfinite().all()
        assert (one - other).norm() <= TOLERANCE[ours[0].dtype] * max(1.0, other.norm().item())


@pytest.mark.parametrize(("dtype", "causal"), [(torch.float64, False), (torch.float32, True)])
def test_keys_beyond_a_heads_reach_are_left_out(
    dtype: torch.dtype, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So steep a bias that far weights are 0: the same numbers from fewer products."""
    monkeypatch.setattr(tiled, "REACH_FROM", 1)
    monkeypatch.setattr(tiled, "TILE_BYTES", 1)
    groups = 1 if dtype == torch.float64 else 3
    inputs = biased(72, causal=causal, heads=3, groups=groups, dtype=dtype, slope=20.0)
    assert_agrees(inputs)
    assert_agrees(replace(inputs, q=inputs.q[:, :, -30:], mask=biased(30, 72, causal).mask))
    few = _flops(inputs)
    monkeypatch.setattr(tiled, "REACH_FROM", 73)
    assert few < 0.8 * _flops(inputs)


def _flops(inputs: AttentionInputs) -> int:
    with FlopCounterMode(display=False) as counter:
        outputs_and_gradients(lambda p: attend(p, "chunked"), inputs)
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
    inputs = biased(19)
    assert inputs.bias is not None
    fixed = replace(inputs, bias=inputs.bias.detach())
    chunked = outputs_and_gradients(lambda p: attend(p, "chunked"), fixed)
    assert_all_close(chunked, outputs_and_gradients(reference, fixed))
    every = torch.autograd.grad(attend(inputs, "chunked").square().sum(), leaves_of(inputs))
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    alone = attend(replace(inputs, q=q, k=k, v=v), "chunked").square().sum()
    torch.testing.assert_close(torch.autograd.grad(alone, inputs.bias)[0], every[3])


def test_a_bias_may_hide_what_is_far() -> None:
    inputs = biased(30)
    assert inputs.bias is not None
    b = inputs.bias.detach().clone()
    b[:, 5:] = -torch.inf
    hidden = replace(inputs, bias=b)
    torch.testing.assert_close(attend(hidden, "chunked"), reference(hidden), rtol=1e-11, atol=1e-12)


def test_no_matrix() -> None:
    """The largest tensors are a tile's scores, the bias of any tile, and its padded gradient."""
    inputs = biased(256, dtype=torch.float32, heads=1)
    with largest() as record:
        outputs_and_gradients(lambda p: attend(p, "chunked"), inputs)
    assert record.numel <= 8 * (256 + 2 * 8)

"""A bias by distance in the tiles, against the float64 definition: outputs and gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from normattn.kernels import AttentionInputs, AttentionMask, attend, tiled
from normattn.kernels.reference import reference
from score.cases import tensors

from .memory import largest

TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
pytestmark = pytest.mark.usefixtures("small_tiles")


def problem(
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
    keys = queries if keys is None else keys
    groups = groups or heads
    q, k, v, b = tensors(
        *((batch, heads, queries, 4), (batch, groups, keys, 4)),
        *((batch, groups, keys, 5), (heads, keys + 1)),
    )
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    fall = torch.arange(1, heads + 1)[:, None] * slope * torch.arange(keys + 1)
    key = torch.arange(keys)
    visibility = AttentionMask(causal, key[keys - queries :], key, aligned=True)
    return AttentionInputs(q, k, v, visibility, bias=(b.detach() - fall).requires_grad_())


def _all(given: AttentionInputs) -> list[Tensor]:
    assert given.bias is not None
    return [given.q, given.k, given.v, given.bias]


def agrees(given: AttentionInputs) -> None:
    """Output and all four gradients, by the norm of the difference."""
    q, k, v, b = (x.detach().double().requires_grad_() for x in _all(given))
    exact = replace(given, q=q, k=k, v=v, bias=b)
    ours, theirs = attend(given, "chunked"), reference(exact)
    along = tensors(tuple(theirs.shape))[0].detach()
    mine = torch.autograd.grad(ours, _all(given), along.to(ours.dtype))
    hers = torch.autograd.grad(theirs, _all(exact), along)
    for one, other in zip((ours, *mine), (theirs, *hers), strict=True):
        assert one.isfinite().all()
        assert (one - other).norm() <= TOLERANCE[ours.dtype] * max(0.1, other.norm().item())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("queries", "keys"),
    [*((n, n) for n in (1, 7, 8, 9, 17, 35)), (1, 20), (5, 6), (9, 31), (16, 32)],
)
def test_ragged_lengths(queries: int, keys: int, causal: bool) -> None:
    agrees(problem(queries, keys, causal, batch=2))


@pytest.mark.parametrize("budget", [1, 8 * 20 * 8, 2 * 8 * 20 * 8, 5 * 8 * 20 * 8, 10**6])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (3, 1)])
def test_heads_and_batch_rows_in_any_tiles(
    budget: int, heads: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled, "TILE_BYTES", budget)
    agrees(problem(20, batch=3, heads=heads, groups=groups))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_keys_beyond_a_heads_reach_are_left_out(
    dtype: torch.dtype, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So steep a bias that far weights are 0: the same numbers from fewer products."""
    monkeypatch.setattr(tiled, "REACH_FROM", 1)
    monkeypatch.setattr(tiled, "TILE_BYTES", 1)
    groups = 1 if dtype == torch.float64 else 3
    given = problem(120, causal=causal, heads=3, groups=groups, dtype=dtype, slope=20.0)
    agrees(given)
    agrees(replace(given, q=given.q[:, :, -50:], visibility=problem(50, 120, causal).visibility))
    few = _flops(given)
    monkeypatch.setattr(tiled, "REACH_FROM", 121)
    assert few < 0.7 * _flops(given)


def _flops(given: AttentionInputs) -> int:
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(attend(given, "chunked").sum(), _all(given))
    return int(counter.get_total_flops())


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.1, 60.0), st.floats(0.1, 4.0))
def test_no_weight_beyond_the_reach(seed: int, slope: float, spread: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, 2, 600, 4, generator=draw) * spread for _ in range(2))
    b = -slope * torch.arange(600.0) + torch.randn(2, 600, generator=draw)
    key = torch.arange(600)
    unit = torch.eye(600).expand(1, 2, -1, -1)
    given = AttentionInputs(q, k, unit, AttentionMask(True, key, key, True), bias=b)
    weight, distance = reference(given), key[:, None] - key
    for head, reach in enumerate(tiled._reach(given) or ()):
        assert (weight[:, head, distance >= reach] < torch.finfo(q.dtype).smallest_normal).all()


def test_a_fixed_bias_has_no_gradient_and_fixed_inputs_neither() -> None:
    given = problem(19)
    fixed = replace(given, bias=_all(given)[3].detach())
    ours = torch.autograd.grad(attend(fixed, "chunked").sum(), (given.q, given.k, given.v))
    exact = torch.autograd.grad(reference(fixed).sum(), (given.q, given.k, given.v))
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
    every = torch.autograd.grad(attend(given, "chunked").square().sum(), _all(given))
    alone = replace(given, q=given.q.detach(), k=given.k.detach(), v=given.v.detach())
    (by_bias,) = torch.autograd.grad(attend(alone, "chunked").square().sum(), _all(given)[3:])
    torch.testing.assert_close(by_bias, every[3])


def test_a_bias_may_hide_what_is_far() -> None:
    given = problem(30)
    b = _all(given)[3].detach().clone()
    b[:, 5:] = -torch.inf
    hidden = replace(given, bias=b)
    torch.testing.assert_close(attend(hidden, "chunked"), reference(hidden), rtol=1e-11, atol=1e-12)


def test_no_matrix() -> None:
    """The largest tensors are a tile's scores, the bias of any tile, and its padded gradient."""
    given = problem(256, dtype=torch.float32, heads=1)
    with largest() as record:
        torch.autograd.grad(attend(given, "chunked").sum(), _all(given))
    assert record.numel <= 8 * (256 + 2 * 8)

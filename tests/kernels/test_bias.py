"""Attention with a bias by distance against the float64 definition: outputs and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from normattn import InputError
from normattn.kernels import AttentionInputs, AttentionMask, bias
from normattn.kernels.bias import bias_attention
from normattn.kernels.dispatch import why_not
from normattn.kernels.reference import reference
from score.cases import tensors

from .memory import largest

TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def problem(
    queries: int,
    keys: int | None = None,
    causal: bool = True,
    batch: int = 1,
    heads: int = 2,
    groups: int | None = None,
    size: int = 4,
    dtype: torch.dtype = torch.float64,
    slope: float = 0.0,
) -> AttentionInputs:
    """A learned bias, falling by `slope` for each token of distance beside the noise."""
    keys = queries if keys is None else keys
    groups = groups or heads
    q, k, v, b = tensors(
        (batch, heads, queries, 4),
        (batch, groups, keys, 4),
        (batch, groups, keys, size),
        (heads, keys + 1),
    )
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    fall = torch.arange(1, heads + 1)[:, None] * slope * torch.arange(keys + 1)
    b = (b.detach() - fall).requires_grad_()
    key = torch.arange(keys)
    visibility = AttentionMask(causal, key[keys - queries :], key, aligned=True)
    return AttentionInputs(q, k, v, visibility, bias=b)


def _all(given: AttentionInputs) -> list[Tensor]:
    assert given.bias is not None
    return [given.q, given.k, given.v, given.bias]


def _double(given: AttentionInputs) -> AttentionInputs:
    q, k, v, b = (x.detach().double().requires_grad_() for x in _all(given))
    return replace(given, q=q, k=k, v=v, bias=b)


def agrees(given: AttentionInputs) -> None:
    """Output and all four gradients, by the norm of the difference."""
    assert why_not("bias", given) is None
    exact = _double(given)
    ours, theirs = bias_attention(given), reference(exact)
    (along,) = tensors(tuple(theirs.shape))
    along = along.detach()
    mine = torch.autograd.grad(ours, _all(given), along.to(ours.dtype))
    hers = torch.autograd.grad(theirs, _all(exact), along)
    tolerance = TOLERANCE[ours.dtype]
    for one, other, source in zip(
        (ours, *mine), (theirs, *hers), (None, *_all(given)), strict=True
    ):
        assert one.isfinite().all()
        assert source is None or one.dtype == source.dtype
        assert (one - other).norm() <= tolerance * max(0.1, other.norm().item())


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 8 rows, so that short sequences have several."""
    monkeypatch.setattr(bias, "ROWS", 8)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17, 35])
def test_ragged_lengths(length: int, causal: bool) -> None:
    agrees(problem(length, causal=causal))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(1, 20), (5, 6), (9, 31), (16, 32)])
def test_the_last_queries_of_more_keys(queries: int, keys: int, causal: bool) -> None:
    agrees(problem(queries, keys, causal, batch=2))


@pytest.mark.parametrize("budget", [1, 8 * 20 * 8, 2 * 8 * 20 * 8, 5 * 8 * 20 * 8, 10**6])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (3, 1)])
def test_heads_and_batch_rows_in_any_tiles(
    budget: int, heads: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bias, "TILE_BYTES", budget)
    agrees(problem(20, batch=3, heads=heads, groups=groups, size=3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("slope", [0.0, 0.5])
def test_precisions(dtype: torch.dtype, slope: float) -> None:
    agrees(problem(43, heads=3, batch=2, dtype=dtype, slope=slope))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_keys_beyond_a_heads_reach_are_left_out(
    dtype: torch.dtype, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So steep a bias that far weights are 0: the same numbers from fewer products."""
    monkeypatch.setattr(bias, "REACH_FROM", 1)
    monkeypatch.setattr(bias, "TILE_BYTES", 1)
    given = problem(120, causal=causal, heads=3, dtype=dtype, slope=20.0)
    agrees(given)
    agrees(replace(given, q=given.q[:, :, -50:], visibility=problem(50, 120, causal).visibility))
    few = _flops(given)
    monkeypatch.setattr(bias, "REACH_FROM", 121)
    assert few < 0.7 * _flops(given)


def _flops(given: AttentionInputs) -> int:
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(bias_attention(given).sum(), _all(given))
    return int(counter.get_total_flops())


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.1, 60.0), st.floats(0.1, 4.0))
def test_no_weight_beyond_the_reach(seed: int, slope: float, spread: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, 2, 600, 4, generator=draw) * spread for _ in range(2))
    b = -slope * torch.arange(600.0) + torch.randn(2, 600, generator=draw)
    key = torch.arange(600)
    given = AttentionInputs(
        q, k, torch.eye(600).expand(1, 2, -1, -1), AttentionMask(True, key, key, True)
    )
    weight = reference(replace(given, bias=b))
    distance = key[:, None] - key
    for head, reach in enumerate(bias._reach(q, k, b)):
        assert (weight[:, head, distance >= reach] < torch.finfo(q.dtype).smallest_normal).all()


def test_a_fixed_bias_has_no_gradient_and_fixed_inputs_neither() -> None:
    given = problem(19)
    fixed = replace(given, bias=_all(given)[3].detach())
    ours = torch.autograd.grad(bias_attention(fixed).sum(), (given.q, given.k, given.v))
    every = torch.autograd.grad(bias_attention(given).square().sum(), _all(given))
    exact = torch.autograd.grad(reference(fixed).sum(), (given.q, given.k, given.v))
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
    alone = replace(given, q=given.q.detach(), k=given.k.detach(), v=given.v.detach())
    (by_bias,) = torch.autograd.grad(bias_attention(alone).square().sum(), _all(given)[3:])
    torch.testing.assert_close(by_bias, every[3])


def test_a_bias_may_hide_what_is_far() -> None:
    given = problem(30)
    b = _all(given)[3].detach().clone()
    b[:, 5:] = -torch.inf
    hidden = replace(given, bias=b)
    torch.testing.assert_close(bias_attention(hidden), reference(hidden), rtol=1e-11, atol=1e-12)


def test_layouts_of_projections() -> None:
    """Tensors that are views of one (B, T, 3·H, D) product."""
    (qkv,) = tensors((2, 21, 6, 4))
    q, k, v = torch.split(qkv.transpose(1, 2), 2, 1)
    given = replace(problem(21, batch=2), q=q, k=k, v=v)
    along = torch.arange(4.0)
    (ours,) = torch.autograd.grad((bias_attention(given) * along).sum(), qkv)
    (exact,) = torch.autograd.grad((reference(given) * along).sum(), qkv)
    torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-12)


def test_no_matrix_and_one_line_of_bias() -> None:
    given = problem(256, dtype=torch.float32, heads=1)
    with largest() as record:
        torch.autograd.grad(bias_attention(given).sum(), _all(given))
    assert record.numel == 8 * (256 + 8)


def test_nothing_to_attend_to() -> None:
    for queries, keys in ((0, 0), (0, 3)):
        given = problem(queries, keys)
        out = bias_attention(given)
        assert out.shape == (1, 2, queries, 4)
        assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), _all(given)))


def test_a_second_derivative_is_refused() -> None:
    given = problem(9)
    with pytest.raises(InputError, match=r"the bias kernel.*second derivatives"):
        torch.autograd.grad(bias_attention(given).sum(), given.q, create_graph=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bias": None}, "there is none"),
        ({"cap": 5.0}, "it has no cap"),
        ({"sink": torch.zeros(2)}, "it has no sink"),
        ({"dropout": 0.1}, "drops no weights"),
        ({"far_q": problem(5).q, "far_k": problem(5).k, "window": 2}, "not two regimes"),
        ({"bias": torch.zeros(2, 4)}, "as many distances as there are keys"),
        ({"q": problem(7).q}, "a key at every query's position"),
    ],
)
def test_what_it_does_not_serve(changes: dict[str, Any], reason: str) -> None:
    assert reason in str(why_not("bias", replace(problem(5), **changes)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"aligned": False}, "consecutive positions"),
        ({"window": 3}, "no window beside plain causality"),
        ({"mask": torch.ones(5, 5, dtype=torch.bool)}, "no mask beside plain causality"),
        ({"padding": torch.zeros(1, 5, dtype=torch.bool)}, "no padding, which is a mask"),
    ],
)
def test_it_takes_plain_causality_only(changes: dict[str, Any], reason: str) -> None:
    given = problem(5)
    given = replace(given, visibility=replace(given.visibility, **changes))
    assert reason in str(why_not("bias", given))

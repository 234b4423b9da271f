"""The Triton kernel in the CPU interpreter against the float64 definition.

TRITON_INTERPRET=1 must be set before triton is imported: `test_triton.py` runs this file so, in a
process of its own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from normattn import InputError
from normattn.kernels import Problem, Visibility, triton_two_regime
from normattn.kernels.capabilities import why_not
from normattn.kernels.reference import reference
from normattn.kernels.triton_two_regime import triton_attention
from score.cases import tensors

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16, the smallest, so that short sequences have several."""
    monkeypatch.setattr(triton_two_regime, "_block", lambda row: 16)


def problem(
    queries: int,
    window: int,
    keys: int | None = None,
    heads: int = 1,
    groups: int | None = None,
    size: int = 4,
    dtype: torch.dtype = torch.float32,
    near_start: int = 0,
    batch: int = 1,
) -> Problem:
    keys = queries if keys is None else keys
    groups = groups or heads
    q, far_q, k, far_k, v = tensors(
        (batch, heads, queries, 4),
        (batch, heads, queries, 4),
        (batch, groups, keys - near_start, 4),
        (batch, groups, keys, 4),
        (batch, groups, keys, size),
    )
    q, far_q, k, far_k, v = (x.detach().to(dtype).requires_grad_() for x in (q, far_q, k, far_k, v))
    key = torch.arange(keys)
    visibility = Visibility(True, key[keys - queries :], key, aligned=True)
    return Problem(q, k, v, visibility, far_q, far_k, window, near_start=near_start)


def _all(given: Problem) -> list[Tensor]:
    found = [given.q, given.k, given.v, given.far_q, given.far_k]
    return [x for x in found if x is not None]


def agrees(given: Problem) -> None:
    assert why_not("triton", given) is None
    q, k, v, far_q, far_k = (x.detach().double().requires_grad_() for x in _all(given))
    exact = replace(given, q=q, k=k, v=v, far_q=far_q, far_k=far_k)
    ours, theirs = triton_two_regime.triton_two_regime(given), reference(exact)
    along = tensors(tuple(theirs.shape))[0].detach()
    mine = torch.autograd.grad(ours, _all(given), along.to(ours.dtype))
    hers = torch.autograd.grad(theirs, _all(exact), along)
    tolerance = TOLERANCE[ours.dtype]
    for one, other in zip((ours, *mine), (theirs, *hers), strict=True):
        assert one.dtype == ours.dtype
        assert (one - other).norm() <= tolerance * max(0.1, other.norm().item())


@pytest.mark.parametrize("window", [1, 15, 16, 17, 33])
def test_windows_about_the_blocks(window: int) -> None:
    agrees(problem(37, window))


@pytest.mark.parametrize(("length", "window"), [(16, 16), (32, 15), (33, 17), (48, 100)])
def test_lengths_about_the_blocks(length: int, window: int) -> None:
    agrees(problem(length, window))


@pytest.mark.parametrize("length", [1, 19, 20, 21, 22])
def test_lengths_about_the_window(length: int) -> None:
    agrees(problem(length, 20))


@pytest.mark.parametrize(("queries", "keys"), [(1, 20), (5, 40), (33, 50)])
def test_the_last_queries_of_more_keys(queries: int, keys: int) -> None:
    agrees(problem(queries, 12, keys))
    agrees(problem(queries, 12, keys, near_start=keys - queries - 11))


@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 2, 4), (3, 1, 7), (2, 2, 20)])
def test_grouped_heads_and_values_of_another_size(heads: int, groups: int, size: int) -> None:
    agrees(problem(21, 9, heads=heads, groups=groups, size=size, batch=2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    agrees(problem(40, 18, dtype=dtype))


def test_tensors_that_are_not_contiguous() -> None:
    given = problem(20, 7)
    v = given.v.detach().mT.contiguous().mT.requires_grad_()
    agrees(replace(given, v=v))


def test_the_log_sum_exp() -> None:
    given = problem(37, 9)
    lse = triton_attention(given).lse
    ones = replace(given, v=torch.eye(37)[None, None])
    diagonal = reference(ones).diagonal(dim1=-2, dim2=-1)
    score = (given.q * given.k).sum(-1)
    torch.testing.assert_close(lse, score - diagonal.log(), rtol=1e-4, atol=1e-5)
    assert not lse.requires_grad


def test_no_queries() -> None:
    given = problem(0, 3, 5)
    out = triton_two_regime.triton_two_regime(given)
    assert out.shape == (1, 1, 0, 4)
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), _all(given)))


def test_a_second_derivative_is_refused() -> None:
    given = problem(9, 3)
    out = triton_two_regime.triton_two_regime(given)
    with pytest.raises(InputError, match=r"the Triton kernel.*second derivatives"):
        torch.autograd.grad(out.sum(), given.q, create_graph=True)

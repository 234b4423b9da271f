"""Every kernel against the reference in float64, outputs and all gradients, over drawn problems."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from normattn.kernels import AttentionInputs, AttentionMask, attend
from normattn.kernels import two_regime as sliding
from normattn.kernels.dispatch import TABLE
from normattn.kernels.reference import reference
from normattn.kernels.two_regime import two_regime

from .memory import largest

few = settings(max_examples=25, deadline=None)


pytestmark = pytest.mark.usefixtures("small_tiles")


def chunked(problem: AttentionInputs) -> Tensor:
    return attend(problem, "chunked")


def _agree(run: Any, problem: AttentionInputs, tolerance: float = 1e-11) -> None:
    inputs = [x for x in problem.tensors if x is not None]
    ours, expected = run(problem), reference(problem)
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)
    grad = torch.randn(ours.shape, dtype=ours.dtype, generator=torch.Generator().manual_seed(1))
    mine = torch.autograd.grad(ours, inputs, grad, allow_unused=True)
    hand = torch.autograd.grad(expected, inputs, grad, allow_unused=True)
    for one, two, x in zip(mine, hand, inputs, strict=True):
        assert one is not None
        assert one.shape == x.shape
        two = torch.zeros_like(x) if two is None else two
        torch.testing.assert_close(one, two, atol=tolerance, rtol=tolerance)


def _mask(draw: random.Random, shape: tuple[int, int, int, int], seed: Any) -> Tensor:
    batch, heads, rows, keys = shape
    size = draw.choice(
        [(rows, keys), (1, keys), (batch, 1, rows, keys), shape, (1, heads, 1, keys)]
    )
    if draw.random() < 0.5:
        return torch.rand(size, generator=seed) < 0.7
    return torch.randn(size, generator=seed, dtype=torch.float64)


def _drawn(draw: random.Random, plain: bool, whole: bool = False) -> AttentionInputs:
    """A problem of any kind; `plain` ones are causal two-regime problems without masks.

    `whole` ones have as many queries as keys.
    """
    seed = torch.Generator().manual_seed(draw.randrange(2**31))
    batch, groups, repeat = draw.choice([1, 3]), draw.choice([1, 2]), draw.choice([1, 1, 2, 3])
    rows = draw.choice([1, 2, 7, 8, 9, 17])
    keys = rows + (0 if whole else draw.choice([0, 0, 3, 9, 20]))
    heads = groups * repeat

    def leaf(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=seed, dtype=torch.float64)
        return made.requires_grad_()

    def sometimes(value: Any, chance: float = 0.3) -> Any:
        return value if draw.random() < chance and not plain else None

    window = draw.choice([1, 3, 6, 25]) if plain or draw.random() < 0.6 else None
    aligned, causal = plain or draw.random() < 0.6, plain or draw.random() < 0.7
    key = torch.arange(keys)
    if not aligned:
        key = (key - torch.randint(0, 3, (batch, 1), generator=seed)).clamp(min=0)
        key = key[0] if draw.random() < 0.3 else key
    documents = torch.randint(0, 3, (batch, keys), generator=seed).sort(-1).values
    documents = sometimes(documents)
    sliding = sometimes(draw.choice([1, 3, 5, 30]), 0.5)
    seen = AttentionMask(
        causal,
        key[..., keys - rows :],
        key,
        aligned,
        sometimes(torch.rand((batch, keys), generator=seed) < 0.3),
        sometimes(_mask(draw, (batch, heads, rows, keys), seed)),
        sliding,
        draw.choice([0, 1, 4]) if sliding else 0,
        None if documents is None else documents[:, keys - rows :],
        documents,
    )
    skipped = 0
    if window is not None and aligned and not whole and draw.random() < 0.3:
        skipped = draw.randint(0, max(0, keys - rows - window + 1))
    return AttentionInputs(
        leaf(batch, heads, rows, 4),
        leaf(batch, groups, keys - skipped, 4),
        leaf(batch, groups, keys, 4 if plain else draw.choice([4, 6])),
        seen,
        None if window is None else leaf(batch, heads, rows, 4),
        None if window is None else leaf(batch, groups, keys, 4),
        window,
        bias=sometimes(leaf(heads, keys + 5)),
        sink=sometimes(leaf(heads)),
        cap=sometimes(1.5),
        near_start=skipped,
    )


@few
@given(st.randoms(use_true_random=False))
def test_chunked_serves_everything_together(draw: random.Random) -> None:
    _agree(chunked, _drawn(draw, plain=False))


@few
@given(st.randoms(use_true_random=False), st.sampled_from([1, 2, 5, 192]))
def test_two_regime(draw: random.Random, rows: int) -> None:
    problem = _drawn(draw, plain=True, whole=True)
    assert TABLE["two-regime"].why_not(problem) is None
    with mock.patch.object(sliding, "ROWS", rows):
        _agree(two_regime, problem)


@pytest.mark.parametrize("rows", [191, 192, 193, 384, 389, 400])
@pytest.mark.parametrize("window", [1, 5, 150, 191, 192, 193, 384])
def test_chunks_of_their_own_size(rows: int, window: int) -> None:
    _agree(two_regime, _regular(rows, window, torch.float64))


def test_chunks_hold_no_matrix() -> None:
    """Of T × S numbers nothing is stored, forward or backward: only one chunk's mask."""
    problem = _regular(4096, 64, torch.float32)
    with largest() as record:
        out = two_regime(problem)
        torch.autograd.grad(out.sum(), [x for x in problem.tensors if x is not None])
    assert record.numel <= 3 * problem.q.numel()


def _regular(
    rows: int, window: int, dtype: torch.dtype, keys: int | None = None, scale: float = 1.0
) -> AttentionInputs:
    keys = keys or rows
    seed = torch.Generator().manual_seed(rows)
    key = torch.arange(keys)

    def leaf(count: int, size: float = 1.0) -> Tensor:
        made = torch.randn((2, 2, count, 8), generator=seed) * size
        return made.to(dtype).requires_grad_()

    seen = AttentionMask(True, key[keys - rows :], key, True)
    q, k, v, far_q, far_k = leaf(rows, scale), leaf(keys), leaf(keys), leaf(rows), leaf(keys)
    return AttentionInputs(q, k, v, seen, far_q, far_k, window)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 11, 12, 13, 25])
def test_lengths_about_the_window_and_the_tile(rows: int) -> None:
    for run in (chunked, two_regime):
        _agree(run, _regular(rows, 12, torch.float64))
    _agree(chunked, _regular(rows, 12, torch.float64, keys=rows + 15))


@pytest.mark.parametrize(("near", "far"), [(200.0, 1.0), (1.0, 200.0)])
def test_one_regime_that_outweighs_the_other(near: float, far: float) -> None:
    """Where the far weights vanish, their gradients are 0, and no infinity comes of it."""
    problem = _regular(30, 4, torch.float64, scale=near)
    assert problem.far_q is not None
    problem.far_q.data *= far
    for run in (two_regime, chunked):
        _agree(run, problem, 1e-9)


def test_one_key_head_of_128_and_wide_values() -> None:
    """The gated attention unit: key size 128, values 2·d wide, not causal too."""
    seed = torch.Generator().manual_seed(0)
    for causal in (True, False):
        key = torch.arange(37)
        q, k = (torch.randn((2, 1, 37, 128), generator=seed).double() / 8 for _ in range(2))
        v = torch.randn((2, 1, 37, 192), generator=seed).double()
        seen = AttentionMask(causal, key, key, True)
        _agree(
            chunked,
            AttentionInputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), seen),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoding_step_over_keys_cut_from_a_cache(dtype: torch.dtype) -> None:
    """Keys that are a part of a larger buffer, near ones of their own; one query."""
    made = [torch.randn(2, 2, count, 8).to(dtype) for count in (1, 1, 50, 50, 6)]
    q, far_q, values, far_k, near = made
    key = torch.arange(40)
    seen = AttentionMask(True, key[-1:], key, True)
    v, cut = values[:, :, :40], far_k[:, :, :40]
    two = AttentionInputs(q, near, v, seen, far_q, cut, 6, near_start=34)
    for problem in (two, AttentionInputs(q, cut, v, seen)):
        wide = [None if x is None else x.double() for x in problem.tensors]
        expected = reference(AttentionInputs.of(problem.settings, wide))
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(
            chunked(problem).double(), expected, atol=tolerance, rtol=tolerance
        )

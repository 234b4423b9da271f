"""Every kernel against the reference in float64, outputs and all gradients, over drawn inputs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from normattn.kernels import AttentionInputs, AttentionMask, attend, tiled, two_regime
from normattn.kernels.dispatch import TABLE
from normattn.kernels.reference import reference

from .memory import largest
from .problems import assert_all_close, make_inputs, outputs_and_gradients

few = settings(max_examples=25, deadline=None)
pytestmark = pytest.mark.usefixtures("small_tiles")


def assert_agrees(backend: str, inputs: AttentionInputs, error: float = 1e-11) -> None:
    def run(inputs: AttentionInputs) -> Tensor:
        return attend(inputs, backend)

    along = torch.randn(*inputs.q.shape[:3], inputs.v.shape[3], dtype=inputs.v.dtype)
    ours = outputs_and_gradients(run, inputs, along)
    assert_all_close(ours, outputs_and_gradients(reference, inputs, along), error)


def _mask(draw: random.Random, shape: tuple[int, int, int, int], seed: Any) -> Tensor:
    batch, heads, rows, keys = shape
    size = draw.choice(
        [(rows, keys), (1, keys), (batch, 1, rows, keys), shape, (1, heads, 1, keys)]
    )
    if draw.random() < 0.5:
        return torch.rand(size, generator=seed) < 0.7
    return torch.randn(size, generator=seed, dtype=torch.float64)


def _drawn(draw: random.Random, plain: bool, whole: bool = False) -> AttentionInputs:
    """Inputs of any kind; `plain` ones are causal, of two regimes, without masks.

    `whole` ones have as many queries as keys.
    """
    seed = torch.Generator().manual_seed(draw.randrange(2**31))
    batch, groups, repeat = draw.choice([1, 3]), draw.choice([1, 2]), draw.choice([1, 1, 2, 3])
    rows = draw.choice([1, 2, 7, 8, 9, 17])
    keys = rows + (0 if whole else draw.choice([0, 0, 3, 9, 20]))
    heads = groups * repeat

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=seed, dtype=torch.float64).requires_grad_()

    def sometimes(value: Any, chance: float = 0.3) -> Any:
        return value if draw.random() < chance and not plain else None

    window = draw.choice([1, 3, 6, 25]) if plain or draw.random() < 0.6 else None
    aligned, causal = plain or draw.random() < 0.6, plain or draw.random() < 0.7
    key = torch.arange(keys)
    if not aligned:
        key = (key - torch.randint(0, 3, (batch, 1), generator=seed)).clamp(min=0)
        key = key[0] if draw.random() < 0.3 else key
    documents = sometimes(torch.randint(0, 3, (batch, keys), generator=seed).sort(-1).values)
    sliding = sometimes(draw.choice([1, 3, 5, 30]), 0.5)
    mask = AttentionMask(
        *(causal, key[..., keys - rows :], key, aligned),
        padding=sometimes(torch.rand((batch, keys), generator=seed) < 0.3),
        attn_mask=sometimes(_mask(draw, (batch, heads, rows, keys), seed)),
        window=sliding,
        sink_tokens=draw.choice([0, 1, 4]) if sliding else 0,
        query_documents=None if documents is None else documents[:, keys - rows :],
        key_documents=documents,
    )
    skipped = 0
    if window is not None and aligned and not whole and draw.random() < 0.3:
        skipped = draw.randint(0, max(0, keys - rows - window + 1))
    return AttentionInputs(
        leaf(batch, heads, rows, 4),
        leaf(batch, groups, keys - skipped, 4),
        leaf(batch, groups, keys, 4 if plain else draw.choice([4, 6])),
        mask,
        far_q=None if window is None else leaf(batch, heads, rows, 4),
        far_k=None if window is None else leaf(batch, groups, keys, 4),
        far_from=window,
        bias=sometimes(leaf(heads, keys + 5)),
        sink=sometimes(leaf(heads)),
        cap=sometimes(1.5),
        near_start=skipped,
    )


@few
@given(st.randoms(use_true_random=False), st.sampled_from([1, 700, 5000, 10**6]))
def test_chunked_serves_everything_together(draw: random.Random, budget: int) -> None:
    """In tiles of one head, of some heads and batch rows, and of all."""
    with mock.patch.object(tiled, "TILE_BYTES", budget):
        assert_agrees("chunked", _drawn(draw, plain=False))


@few
@given(st.randoms(use_true_random=False), st.sampled_from([1, 2, 5, 192]))
def test_two_regime(draw: random.Random, rows: int) -> None:
    inputs = _drawn(draw, plain=True, whole=True)
    assert TABLE["two-regime"].why_not(inputs) is None
    with mock.patch.object(two_regime, "ROWS", rows):
        assert_agrees("two-regime", inputs)


@pytest.mark.parametrize(
    ("rows", "window"), [(191, 192), (192, 1), (192, 191), (193, 192), (193, 193), (389, 150)]
)
def test_chunks_of_their_own_size(rows: int, window: int) -> None:
    shape: Any = {"batch": 1, "heads": 2, "groups": 1, "size": 4}
    assert_agrees("two-regime", make_inputs(rows, rows, "two regimes", far_from=window, **shape))


def test_chunks_hold_no_matrix() -> None:
    """Of T × S numbers nothing is stored, forward or backward: only one chunk's mask."""
    inputs = make_inputs(1024, 1024, "two regimes", far_from=64, dtype=torch.float32)
    with largest() as record:
        outputs_and_gradients(lambda p: attend(p, "two-regime"), inputs)
    assert record.numel <= 3 * inputs.q.numel()


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 11, 12, 13, 25])
def test_lengths_about_the_window_and_the_tile(rows: int) -> None:
    for backend in ("chunked", "two-regime"):
        assert_agrees(backend, make_inputs(rows, rows, "two regimes", far_from=12))
    assert_agrees("chunked", make_inputs(rows, rows + 15, "two regimes", far_from=12))


@pytest.mark.parametrize(("near", "far"), [(200.0, 1.0), (1.0, 200.0)])
def test_one_regime_that_outweighs_the_other(near: float, far: float) -> None:
    """Where the far weights vanish, their gradients are 0, and no infinity comes of it."""
    inputs = make_inputs(30, 30, "two regimes", far_from=4)
    assert inputs.far_q is not None
    inputs.q.data *= near
    inputs.far_q.data *= far
    for backend in ("two-regime", "chunked"):
        assert_agrees(backend, inputs, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoding_step_over_keys_cut_from_a_cache(dtype: torch.dtype) -> None:
    """Keys that are a part of a larger buffer, near ones of their own; one query."""
    made = [torch.randn(2, 2, count, 8).to(dtype) for count in (1, 1, 50, 50, 6)]
    q, far_q, values, far_k, near = made
    key = torch.arange(40)
    mask = AttentionMask(True, key[-1:], key, True)
    v, cut = values[:, :, :40], far_k[:, :, :40]
    two = AttentionInputs(q, near, v, mask, far_q, cut, 6, near_start=34)
    error = 1e-5 if dtype == torch.float32 else 3e-2
    for inputs in (two, AttentionInputs(q, cut, v, mask)):
        wide = [None if x is None else x.double() for x in inputs.tensors]
        expected = reference(AttentionInputs.of(inputs.settings, wide))
        out = attend(inputs, "chunked").double()
        torch.testing.assert_close(out, expected, atol=error, rtol=error)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (0, 0), (3, 0)])
def test_nothing_to_attend_to(backend: str, queries: int, keys: int) -> None:
    inputs = make_inputs(queries, max(queries, keys), causal=False)
    inputs = replace(inputs, k=inputs.k[:, :, :keys], v=inputs.v[:, :, :keys])
    at = torch.arange(keys)
    inputs = replace(inputs, mask=AttentionMask(False, torch.arange(queries), at, True))
    out, *grads = outputs_and_gradients(lambda p: attend(p, backend), inputs)
    assert out.shape == (2, 4, queries, 8)
    assert all((x == 0).all() for x in (out, *grads))

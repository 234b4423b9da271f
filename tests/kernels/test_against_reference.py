"""Every kernel against the reference: drawn inputs, biases by distance, layouts in memory.

The stock flash operators, called directly, assume a dense last axis and read out of bounds without
one; nothing may depend on how an operand lies.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from normattn.kernels import AttentionInputs, AttentionMask, attend, tiled, two_regime
from normattn.kernels.dispatch import KERNELS, TABLE
from normattn.kernels.reference import reference
from score.cases import IN_MEMORY
from thorough import half_of

from .problems import assert_all_close, in_float64, make_inputs, outputs_and_gradients

few = settings(max_examples=25, deadline=None)
pytestmark = pytest.mark.usefixtures("small_tiles")


def assert_agrees(backend: str, inputs: AttentionInputs, error: float = 1e-11) -> None:
    along = torch.randn(*inputs.q.shape[:3], inputs.v.shape[3], dtype=inputs.v.dtype)
    ours = outputs_and_gradients(lambda p: attend(p, backend), inputs, along)
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


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 11, 12, 13, 25])
def test_lengths_about_the_window_and_the_tile(rows: int) -> None:
    for backend in ("chunked", "two-regime"):
        assert_agrees(backend, make_inputs(rows, rows, "two regimes", far_from=12))
    assert_agrees("chunked", make_inputs(rows, rows + 15, "two regimes", far_from=12))


@pytest.mark.parametrize(
    ("rows", "window"), [(191, 192), (192, 1), (192, 191), (193, 192), (193, 193), (389, 150)]
)
def test_chunks_of_their_own_size(rows: int, window: int) -> None:
    shape: Any = {"batch": 1, "heads": 2, "groups": 1, "size": 4}
    assert_agrees("two-regime", make_inputs(rows, rows, "two regimes", far_from=window, **shape))


@pytest.mark.parametrize(("near", "far"), [(200.0, 1.0), (1.0, 200.0)])
def test_one_regime_that_outweighs_the_other(near: float, far: float) -> None:
    """Where the far weights vanish, their gradients are 0, and no infinity comes of it."""
    inputs = make_inputs(30, 30, "two regimes", far_from=4)
    assert inputs.far_q is not None
    inputs.q.data *= near
    inputs.far_q.data *= far
    for backend in ("two-regime", "chunked"):
        assert_agrees(backend, inputs, 1e-9)


STEEP: dict[str, Any] = {"batch": 1, "heads": 2, "groups": 2, "size": 4, "values": 5}


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
    shape, steep = {**STEEP, "heads": 3, "groups": groups}, -20.0 * torch.arange(1, 4)[:, None]
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
    inputs = make_inputs(19, 19, "bias", **STEEP)
    assert inputs.bias is not None
    fixed = replace(inputs, bias=inputs.bias.detach())
    expected = outputs_and_gradients(reference, fixed)
    assert_all_close(outputs_and_gradients(chunked, fixed), expected)
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    alone = replace(inputs, q=q, k=k, v=v)
    expected = outputs_and_gradients(reference, alone)
    assert_all_close(outputs_and_gradients(chunked, alone), expected)
    # A bias may hide what is far.
    fixed.bias[:, 5:] = -torch.inf  # type: ignore[index]
    assert_all_close([chunked(fixed)], [reference(fixed)])


S, NAMES = 20, ("q", "k", "v", "far_q", "far_k", "gradient")
# In such an order that each half of them has both types.
KINDS = [
    *(("two regimes", torch.float32), ("two regimes", torch.bfloat16)),
    *(("plain", torch.bfloat16), ("plain", torch.float32)),
    *(("bias", torch.float32), ("bias", torch.bfloat16)),
]


def _cases(change: str) -> list[tuple[int, tuple[str, ...]]]:
    """Numbers of queries, and what is laid out strangely: one by one where most can be missed."""
    alone = [(S, (name,)) for name in NAMES] if change == "two regimes" else [(S, NAMES)]
    return [*alone, (6, NAMES)]


@pytest.mark.parametrize(("layout", "kind"), half_of([*IN_MEMORY], KINDS))
def test_any_layout(layout: str, kind: tuple[str, torch.dtype]) -> None:
    change, dtype = kind
    for rows, strange in _cases(change):

        def laid(name: str, x: Tensor, strange: tuple[str, ...] = strange) -> Tensor:
            return IN_MEMORY[layout](x) if name in strange else x

        def copied(name: str, x: Tensor, strange: tuple[str, ...] = strange) -> Tensor:
            return laid(name, x, strange).contiguous()

        def made(how: object, rows: int = rows) -> AttentionInputs:
            return make_inputs(rows, S, change, far_from=12, dtype=dtype, layout=how)  # type: ignore[arg-type]

        inputs, plain = made(laid), made(copied)
        by_out = laid("gradient", torch.randn(inputs.q.shape, dtype=dtype))
        for kernel in KERNELS:
            if kernel.why_not(inputs) is not None:
                continue
            run = partial(attend, backend=kernel.name)
            ours = outputs_and_gradients(run, inputs, by_out)
            expected = outputs_and_gradients(run, plain, by_out.contiguous())
            for mine, theirs in zip(ours, expected, strict=True):
                off = 1e-5 if mine.dtype == torch.float32 else 2e-2
                mine, theirs = mine.detach().double(), theirs.detach().double()
                error = (mine - theirs).abs().max() / theirs.abs().max().clamp(min=1)
                assert float(error) < off, f"{kernel.name}, {strange}: {float(error)}"

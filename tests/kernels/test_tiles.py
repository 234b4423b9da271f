"""Tiles cover every query of every head once, see what they must, and keep to their size."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from normattn import attention
from normattn.kernels import tiled
from normattn.kernels.tiled import Plan
from score.cases import tensors

from .memory import largest
from .problems import make_inputs


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("sliding", [(None, 0), (2, 0), (3, 1), (5, 2), (2, 9)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("aligned", [True, False])
def test_every_pair_is_in_one_span(
    window: int | None,
    sliding: tuple[int | None, int],
    causal: bool,
    aligned: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A visible pair is in exactly one span of its regime within the span's bounds."""
    monkeypatch.setattr(tiled, "ROWS", 3)
    for queries, more in itertools.product((1, 3, 7), (0, 2, 9)):
        keys = queries + more
        mask: dict[str, Any] = {
            "causal": causal,
            "aligned": aligned,
            "window": sliding[0],
            "kept": sliding[1],
        }
        change = "plain" if window is None else "two regimes"
        inputs = make_inputs(queries, keys, change, far_from=window or 0, **mask)
        distance = torch.arange(more, keys)[:, None] - torch.arange(keys)
        found = torch.zeros(2, queries, keys, dtype=torch.int64)
        for tile in Plan.of(inputs).tiles:
            for span in tile.spans:
                part = distance[tile.rows, span.columns]
                inside = torch.ones_like(part, dtype=torch.bool)
                if span.lowest is not None:
                    inside &= part >= span.lowest
                if span.highest is not None:
                    inside &= part <= span.highest
                found[int(span.far), tile.rows, span.columns] += inside
        hidden = inputs.visibility.hidden(slice(None), slice(None))
        visible = ~hidden if hidden is not None else torch.ones_like(distance, dtype=torch.bool)
        far = distance >= window if window is not None else torch.zeros_like(visible)
        assert (found[0][visible & ~far] == 1).all()
        assert (found[1][visible & far] == 1).all()
        if aligned:
            assert (found[0][~visible | far] == 0).all()
            assert (found[1][~visible | ~far] == 0).all()


@pytest.mark.parametrize("repeat", [1, 2])
@pytest.mark.parametrize("budget", [1, 300, 700, 5000])
def test_groups_hold_every_head_once_within_the_budget(
    budget: int, repeat: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled, "ROWS", 4)
    monkeypatch.setattr(tiled, "TILE_BYTES", budget)
    for batch, groups, queries, more in itertools.product((1, 3), (1, 4), (1, 3, 7), (0, 2)):
        shape: dict[str, Any] = {"batch": batch, "heads": groups * repeat, "groups": groups}
        inputs = make_inputs(queries, queries + more, dtype=torch.float32, **shape)
        plan, found = Plan.of(inputs), torch.zeros(batch, groups)
        for group in plan.groups(inputs.q):
            part = found[group.batch, group.heads]
            part += 1
            for tile in plan.tiles:
                rows = (tile.rows.stop - tile.rows.start) * repeat
                size = part.numel() * rows * tile.width * 4
                assert rows <= 4
                assert size <= budget or part.numel() == 1
        assert (found == 1).all()


def test_a_sliding_window_costs_its_width() -> None:
    plan = Plan.of(make_inputs(4096, 4096, window=100, kept=4))
    assert all(tile.width <= 4 + 100 + tiled.ROWS for tile in plan.tiles)


def test_a_decoding_step_touches_each_key_once() -> None:
    inputs = make_inputs(1, 100, "two regimes", far_from=8)
    (tile,) = Plan.of(replace(inputs, k=inputs.k[:, :, 92:], near_start=92)).tiles
    spans = {(span.far, span.start, span.stop) for span in tile.spans}
    assert spans == {(True, 0, 92), (False, 92, 100)}


@pytest.mark.parametrize("name", ["KNA", "KNA-ReRoPE(window=20)"])
@pytest.mark.parametrize("positions", [False, True])
def test_tiles_never_make_the_whole_matrix(
    name: str, positions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled, "ROWS", 8)
    q, k, v = tensors((1, 1, 128, 4), (1, 1, 128, 4), (1, 1, 128, 6))
    where = torch.arange(128) if positions else None
    with largest() as record:
        out = attention(q, k, v, name, backend="chunked", q_positions=where, k_positions=where)
        torch.autograd.grad(out.sum(), (q, k, v))
    # With two regimes the columns where both are near the window are there twice.
    assert record.numel <= 8 * 128 * (2 if positions else 1) + 8 * 8
    with largest() as record:
        attention(q, k, v, name, backend="reference")
    assert record.numel == 128 * 128


def test_two_regimes_touch_the_pairs_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The multiplications of near and far together are about those of one causal attention."""
    monkeypatch.setattr(tiled, "ROWS", 8)
    q, k, v = tensors((1, 1, 256, 4), (1, 1, 256, 4), (1, 1, 256, 4))

    def flops(name: str) -> int:
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(attention(q, k, v, name, backend="chunked").sum(), (q, k, v))
        return int(counter.get_total_flops())

    assert flops("KNA-ReRoPE(window=64)") <= 1.1 * flops("KNA")

"""Tiles keep to their size, and touch no more pairs than they must."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from normattn import attention
from normattn.kernels import tiled
from normattn.kernels.tiled import TilePlan
from score.cases import tensors

from .memory import largest
from .problems import make_inputs


def test_a_sliding_window_costs_its_width() -> None:
    plan = TilePlan.of(make_inputs(4096, 4096, window=100, sink_tokens=4))
    assert all(tile.width <= 4 + 100 + tiled.ROWS for tile in plan.tiles)


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

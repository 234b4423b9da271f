"""No kernel holds a matrix of all pairs, or touches more of them than it must."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from normattn import Score, attention
from normattn.kernels import reference, tiled, two_regime
from normattn.kernels.tiled import TilePlan
from score.cases import tensors

from .memory import largest
from .problems import make_inputs

B, H, G, T, D = 2, 4, 2, 128, 8
SHAPES = (B, H, T, D), (B, G, T, D), (B, G, T, D)
TILE = B * H * 8 * (T + 8)
# With two regimes the columns where both are near the window are there twice; a bias has a padded
# gradient; strips hold a few rows.
CASES = [
    *[(text, "chunked", False, TILE) for text in ("KNA", "KNA-ReRoPE(window=20)")],
    *[(text, "chunked", True, 2 * TILE) for text in ("KNA", "KNA-ReRoPE(window=20)")],
    ("Baseline-KERPLELog", "chunked", False, TILE + B * H * 8 * 8),
    ("KNA-ReRoPE(window=20)", "two-regime", False, 3 * B * H * T * D),
    ("Baseline-FIRE@32", "strips", False, B * H * T * T // 4),
    ("Baseline-CoPE(positions=6)", "strips", False, B * H * T * T // 4),
    ("KNA-DualChunk(size=48,local=8)", "auto", False, B * H * T * 48 // 4),
]


@pytest.mark.parametrize(("text", "backend", "positions", "most"), CASES)
def test_no_tensor_holds_every_pair(
    text: str, backend: str, positions: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in a forward nor in a backward; the reference shows that one would be noticed."""
    monkeypatch.setattr(tiled, "ROWS", 8)
    monkeypatch.setattr(two_regime, "ROWS", 16)
    monkeypatch.setattr(reference, "STRIP_BYTES", 8 * T * (B * H + 36) * 4)
    score, at = Score(text, H, D, G).double(), torch.arange(T) if positions else None
    q, k, v = tensors(*SHAPES)
    for way in (backend, "reference"):
        with largest() as record:
            out = attention(q, k, v, score, backend=way, q_positions=at, k_positions=at)
            torch.autograd.grad(out.sum(), [q, k, v, *score.parameters()])
        assert (record.numel <= most) == (way == backend), (way, record.numel)


def test_a_sliding_window_costs_its_width() -> None:
    plan = TilePlan.of(make_inputs(4096, 4096, window=100, sink_tokens=4))
    assert all(tile.width <= 4 + 100 + tiled.ROWS for tile in plan.tiles)


def test_two_regimes_touch_the_pairs_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The multiplications of near and far together are about those of one causal attention."""
    monkeypatch.setattr(tiled, "ROWS", 8)
    q, k, v = tensors(*[(1, 1, 256, 4)] * 3)

    def flops(name: str) -> int:
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(attention(q, k, v, name, backend="chunked").sum(), (q, k, v))
        return int(counter.get_total_flops())

    assert flops("KNA-ReRoPE(window=64)") <= 1.1 * flops("KNA")

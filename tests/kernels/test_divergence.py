"""A query or key that is not finite makes NaN of every row that reads it, by every kernel."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from normattn import Score, attention
from normattn.kernels import AttentionInputs, attend, numerics, tiled
from normattn.kernels.dispatch import KERNELS
from normattn.layers import folded, plan
from normattn.layers.cache import KeyValueCache

from .problems import WAYS, R, make_inputs, make_layers, run_layers

# In bf16 only the rows that must be NaN are asked about: of 16 n + 1 rows of odd length oneDNN's
# AMX product, and so torch's own linear layer, shows a NaN of the last row in the one before too.
S, D = 40, 8
values_and_types = pytest.mark.parametrize(
    ("value", "dtype"),
    [(math.nan, torch.float32), (-math.inf, torch.float32), (math.inf, torch.bfloat16)],
)

# Rows, whether causal, and which query or key is spoilt. Of a decoding step only the newest key:
# older ones were looked at when they were new.
CALLS = (
    *((S, True, "q", 3), (S, True, "k", 3), (S, False, "k", S - 1)),
    *((6, True, "q", 3), (6, True, "k", S - 1), (1, True, "k", S - 1)),
)


def _spoilt(inputs: AttentionInputs, side: str, place: int, value: float) -> Tensor:
    """Spoil one query or key of every head; the rows that then are NaN."""
    near, far = (inputs.q, inputs.far_q) if side == "q" else (inputs.k, inputs.far_k)
    for x in (near, far):
        if x is not None:
            x[:, :, place, 0] = value
    rows = torch.arange(inputs.q.shape[2])
    if side == "q":
        return rows == place
    mask = inputs.mask
    return mask.query >= mask.key[place] if mask.causal else torch.ones_like(rows) > 0


@values_and_types
@pytest.mark.parametrize("change", ["plain", "two regimes", "bias", "sink", "padding"])
def test_the_same_rows_by_every_kernel(change: str, value: float, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"batch": 1, "dtype": dtype, "learned": False, "far_from": 12}
    if change == "padding":
        options["padding"] = torch.zeros(1, S, dtype=torch.bool)
    for rows, causal, side, place in CALLS:
        if change == "two regimes" and not causal:
            continue
        kind = change.replace("padding", "plain")
        inputs = make_inputs(rows, S, kind, causal=causal, **options)
        expected = _spoilt(inputs, side, place, value)
        for kernel in KERNELS:
            # flex_attention is traced again for each number of rows.
            if kernel.why_not(inputs) is not None or (kernel.name == "flex" and rows < S):
                continue
            where = f"{kernel.name}, {rows} rows, causal {causal}, {side}{place}"
            _assert_spoilt(attend(inputs, kernel.name), expected.expand(inputs.q.shape[:3]), where)


def _assert_spoilt(out: Tensor, expected: Tensor, where: str) -> None:
    """NaN in the expected rows (B, H, T), and in float32 in no other."""
    assert out[expected].isnan().all(), where
    if out.dtype == torch.float32:
        assert out[~expected].isfinite().all(), where


@pytest.mark.parametrize(
    "score",
    ["Baseline", "Baseline-NoPE", "KNA-logn@8", "Baseline-ALiBi", "Baseline-ReRoPE(window=3)"],
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@torch.no_grad()
def test_decoding(score: str, value: float) -> None:
    """A spoilt key is NaN for its own row and for every later one."""
    module = Score(score, 2, D, 1).eval()
    for first in (1, 5):
        cache, seed = KeyValueCache(), torch.Generator().manual_seed(0)
        for step, count in enumerate((first, 1, 1, 1)):
            q, k, v = (torch.randn((1, heads, count, D), generator=seed) for heads in (2, 1, 1))
            if step == 1:
                k[:, :, 0, 0] = value
            out = attention(q, k, v, module, cache=cache)
            assert bool(out.isnan().all()) == (step > 0), step
            assert bool(out.isfinite().all()) == (step == 0), step
        q, k, v = (torch.randn((1, heads, 1, D), generator=seed) for heads in (2, 1, 1))
        q[:, :, 0, 0] = value
        assert attention(q, k, v, module, cache=KeyValueCache()).isnan().all()


@pytest.mark.parametrize("score", ["KNA-logn@8", "Baseline-ALiBi", "Baseline-ReRoPE(window=3)"])
@pytest.mark.parametrize("value", [math.inf, -math.inf])
@torch.no_grad()
def test_no_infinite_key_is_kept_where_the_host_cannot_look(
    score: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA: every new key goes through x + 0·x, and later tokens read a NaN."""
    plan._PLANS.clear()
    for module in (numerics, folded):
        monkeypatch.setattr(module, "host_can_read", lambda x: False)
    layer, cache = Score(score, 2, D, 1).eval(), KeyValueCache()
    for step in range(3):
        q, k, v = (torch.randn((1, heads, 1, D)) for heads in (2, 1, 1))
        if step == 1:
            k[:, :, 0, :2] = value
        attention(q, k, v, layer, cache=cache)
    plan._PLANS.clear()
    kept, _ = cache.append(k[:, :, :0], v[:, :, :0])
    assert kept[:, :, 1, 0].isnan().all()
    assert not kept.isinf().any()
    assert kept[:, :, ::2].isfinite().all()


@values_and_types
@pytest.mark.parametrize("case", ["causal", "window", "padding", "cap", "bias"])
@torch.no_grad()
def test_residual_scores_keep_it_from_earlier_rows(
    case: str, value: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that is spoilt in one layer is mask, there and above, by the rows that see it."""
    monkeypatch.setattr(tiled, "ROWS", 8)
    place = 11
    for spoilt in range(3):
        layers = make_layers(case, dtype=dtype)
        layers[spoilt].k[:, :, place, 0] = value
        hidden = layers[0].mask.hidden(slice(0, R), slice(0, layers[0].k.shape[2]))
        assert hidden is not None
        reads = ~hidden[..., place].expand(layers[0].q.shape[:3])
        for way in WAYS:
            for number, out in enumerate(run_layers(layers, way)):
                expected = reads if number >= spoilt else torch.zeros_like(reads)
                _assert_spoilt(out, expected, f"{way}, spoilt in {spoilt}, layer {number}")

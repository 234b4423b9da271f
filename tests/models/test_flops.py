"""Parameters and FLOPs against torch's own counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from normattn.errors import InputError
from normattn.models.causal_lm import CausalLM
from normattn.models.config import CausalLMConfig
from normattn.models.flops import flops_per_token, parameter_count, visible_pairs
from normattn.score import ScoreSpec

CONFIGS: list[dict[str, Any]] = [
    {"heads": 4, "kv_heads": 2},
    {"heads": 4, "head_dim": 16, "feed_forward": "gelu", "tie_head": False, "norm": "layer"},
    {"heads": 2, "hidden": 24, "norm_gain": False, "placement": "PostLN"},
    {"block": "gau", "key_size": 8, "expansion": 3, "placement": "ReZero"},
]


def _config(changes: dict[str, Any]) -> CausalLMConfig:
    return CausalLMConfig(vocab_size=40, dim=32, layers=3, train_length=16, **changes)


@pytest.mark.parametrize("changes", CONFIGS)
def test_parameters_and_weight_flops_are_those_that_torch_counts(changes: dict[str, Any]) -> None:
    config, length = _config(changes), 12
    model = CausalLM(config)
    distinct = {value.data_ptr(): value.numel() for value in model.state_dict().values()}
    assert parameter_count(config) == parameter_count(model) == sum(distinct.values())
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, length, dtype=torch.int64))
    counts = counter.get_flop_counts()["Global"]
    weights = sum(counts.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    assert flops_per_token(config, length).weights * 2 * length == weights
    with pytest.raises(InputError, match="at least 1"):
        flops_per_token(config, 0)


T, W = 32, 16
CAUSAL_PAIRS = T * (T + 1) // 2
WINDOW = W * (W + 1) // 2 + (T - W) * W


@pytest.mark.parametrize(
    ("score", "seen", "width"),
    [
        ("Baseline", CAUSAL_PAIRS, 2),
        (f"Baseline-SlidingWindow(window={W})", WINDOW, 2),
        # The first two tokens are seen by those whose window has left them.
        (f"Baseline-StreamingLLM(window={W},sinks=2)", WINDOW + 1 + 2 * (T - W - 1), 2),
        ("Baseline-Chunked(size=12)", 2 * 78 + 36, 2),
        ("Baseline-ReRoPE(window=4)", CAUSAL_PAIRS, 2),
        ("Baseline-PoPE", CAUSAL_PAIRS, 3),  # Queries and keys are twice as wide, values are not.
        ("Baseline-Differential", CAUSAL_PAIRS, 3),
    ],
)
def test_attention_flops_count_what_the_score_sees(score: str, seen: int, width: int) -> None:
    config = _config({"heads": 4, "score": score})
    assert flops_per_token(config, T).attention * T == 2 * 3 * seen * width * 32


@pytest.mark.parametrize(
    "score", ["Baseline", "Baseline-SlidingWindow(window=5)", "Baseline-Chunked(size=7)"]
)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 21])
def test_pairs_are_those_of_the_mask(score: str, causal: bool, length: int) -> None:
    spec = ScoreSpec.parse(score, 16)
    window, chunk = spec.window[0] or length, spec.chunk or length
    seen = sum(
        (j <= i or not causal) and abs(i - j) < window and i // chunk == j // chunk
        for i in range(length)
        for j in range(length)
    )
    assert visible_pairs(spec, length, causal) == seen

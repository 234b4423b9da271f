"""Parameters and FLOPs against torch's own counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from normattn.errors import InputError
from normattn.models.accounting import flops_per_token, parameter_count
from normattn.models.causal_lm import CausalLM
from normattn.models.config import CausalLMConfig

CONFIGS: list[dict[str, Any]] = [
    {"heads": 4, "kv_heads": 2},
    {"heads": 4, "head_dim": 16, "feed_forward": "gelu", "tie_head": False, "norm": "layer"},
    {"heads": 2, "hidden": 24, "norm_gain": False, "placement": "PostLN"},
    {"block": "gau", "key_size": 8, "expansion": 3, "placement": "ReZero"},
]


def _config(changes: dict[str, Any]) -> CausalLMConfig:
    return CausalLMConfig(vocab_size=40, dim=32, layers=3, train_length=16, **changes)


@pytest.mark.parametrize("changes", CONFIGS)
def test_parameters_are_the_sum_of_the_tensors(changes: dict[str, Any]) -> None:
    config = _config(changes)
    model = CausalLM(config)
    distinct = {value.data_ptr(): value.numel() for value in model.state_dict().values()}
    assert parameter_count(model) == sum(distinct.values())
    assert parameter_count(config) == parameter_count(model)


def test_parameters_by_hand() -> None:
    # Embedding and head; 3 blocks of qkv, out, gate, up, down and two gains; a final gain.
    config = _config({"heads": 4})
    block = 4 * 32 * 32 + 3 * 32 * 80 + 2 * 32
    assert parameter_count(config) == 40 * 32 + 3 * block + 32


@pytest.mark.parametrize("changes", CONFIGS)
def test_weight_flops_are_those_that_torch_counts(changes: dict[str, Any]) -> None:
    config, length = _config(changes), 12
    model = CausalLM(config)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, length, dtype=torch.int64))
    counts = counter.get_flop_counts()["Global"]
    weights = sum(counts.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    assert flops_per_token(config, length).weights * 2 * length == weights


@pytest.mark.parametrize(("changes", "pair"), [(CONFIGS[0], 2 * 32), (CONFIGS[3], 8 + 96)])
def test_attention_flops_count_the_causal_pairs(changes: dict[str, Any], pair: int) -> None:
    # Each of the T(T + 1)/2 pairs of a layer: key width for the score, value width for the sum.
    pairs = sum(1 for i in range(12) for j in range(12) if j <= i)
    flops = flops_per_token(_config(changes), 12)
    assert flops.attention * 12 == 2 * 3 * pairs * pair
    assert flops.forward == flops.weights + flops.attention
    assert flops.training == 3 * flops.forward


def test_a_length_below_one_is_refused() -> None:
    with pytest.raises(InputError, match="at least 1"):
        flops_per_token(_config(CONFIGS[0]), 0)

"""The configuration: what it resolves, refuses and costs, by torch's own counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from normattn.errors import InputError
from normattn.layers.norms import RMSNorm
from normattn.models import CausalLM, Translator
from normattn.models.config import CausalLMConfig, TranslatorConfig, VisionConfig
from normattn.models.flops import (
    flops_per_image,
    flops_per_token,
    parameter_count,
    translator_flops,
    visible_pairs,
)
from normattn.models.vision_transformer import VisionTransformer
from normattn.score import ScoreSpec

GOOD: dict[str, Any] = {"vocab_size": 32, "dim": 16, "layers": 2, "heads": 2, "train_length": 64}


def test_the_score_is_resolved_with_the_training_length_and_the_dump_comes_back() -> None:
    config = CausalLMConfig(**GOOD | {"score": "KNA-logn"})
    assert config.score == ScoreSpec.parse("KNA-logn", train_length=64)
    assert config == CausalLMConfig(**GOOD, score=ScoreSpec.parse("KNA-logn@64"))
    assert CausalLMConfig(**config.model_dump(mode="json")) == config
    assert CausalLMConfig(**GOOD) == CausalLMConfig(**GOOD | {"score": "Baseline"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 0}, "dim: .*greater than or equal to 1, got 0"),
        ({"dim": "wide"}, "dim: .*integer, got 'wide'"),
        ({"train_length": 1}, "train_length: .* greater than or equal to 2"),
        ({"dropout": 1.0}, "dropout: .* less than 1"),
        ({"init_std": 0.0}, "init_std: .* greater than 0"),
        ({"gamma_std": 1.0}, "gamma_std has no meaning for block 'mha'"),
        ({"block": "gau", "heads": 1, "separate_qk": True, "gamma_std": 1.0}, "gamma_std"),
        ({"norm_eps": float("nan")}, "norm_eps: "),
        ({"placement": "SandwichLN"}, "placement: .*'PreLN'.*'SandwichLN'"),
        ({"depth": 3}, "depth: there is no such setting"),
        ({"score": "KNA@128"}, "train_length of 128, but the model's is 64"),
        ({"score": "Baseline-YaRN"}, "needs factor"),
        ({"score": 3}, "score: .*3"),
        ({"score": "KBatchNorm"}, "see the future"),
        ({"shared_layers": True, "score": "KNA-NoPEEvery(every=2)"}, "differs from layer to layer"),
        ({"heads": 3}, "width of 16 does not divide into 3 heads"),
        ({"kv_heads": 4}, "2 query heads cannot share 4"),
        ({"eps_placement": "outside", "norm": "layer"}, "no meaning for norm 'layer'"),
        ({"eps_placement": "outside", "placement": "FixedScale"}, "eps_placement has no meaning"),
        ({"key_size": 64}, "key_size has no meaning for block 'mha'"),
        ({"block": "gau"}, "has one head; heads is 2"),
        ({"block": "gau", "heads": 1, "hidden": 64}, "hidden has no meaning for block 'gau'"),
        ({"heads": 16}, "even head dimension"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        CausalLMConfig(**(GOOD | change))
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="train_length is missing"):
        CausalLMConfig(vocab_size=32, dim=16, layers=2)  # type: ignore[call-arg]


def test_eps_placement_reaches_every_norm_and_stays_out_of_a_dump_by_default() -> None:
    model = CausalLM(CausalLMConfig(**GOOD, norm_eps=0.5, eps_placement="outside"))
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    assert [norm.eps_placement for norm in norms] == ["outside"] * 5
    x = torch.full((1, 16), 2.0)
    torch.testing.assert_close(norms[0](x), torch.full((1, 16), 2.0 / 2.5))
    assert CausalLMConfig(**model.config.model_dump(mode="json")) == model.config
    assert "eps_placement" not in CausalLMConfig(**GOOD).model_dump(mode="json")


def test_a_first_loss_near_the_logarithm_of_the_vocabulary() -> None:
    """A tied head under a normalised embedding starts far above it unless embedding_std is said."""
    torch.manual_seed(0)
    shape = {"vocab_size": 2048, "dim": 192, "layers": 3, "block": "gau", "train_length": 32}
    settings: dict[str, Any] = {**shape, "placement": "DeepNorm", "norm_gain": False}
    loud, quiet = CausalLMConfig(**settings), CausalLMConfig(**settings, embedding_std=0.02)
    ids = torch.randint(2048, (16, 33))
    assert float(CausalLM(loud).loss(ids).loss) > 9
    assert float(CausalLM(quiet).loss(ids).loss) == pytest.approx(math.log(2048), abs=0.1)
    assert "embedding_std" not in loud.model_dump(mode="json")
    assert CausalLMConfig(**quiet.model_dump(mode="json")) == quiet


# Parameters and FLOPs.
CONFIGS: list[dict[str, Any]] = [
    {"heads": 4, "kv_heads": 2},
    {"heads": 4, "head_dim": 16, "feed_forward": "gelu", "tie_head": False, "norm": "layer"},
    {"heads": 2, "hidden": 24, "norm_gain": False, "placement": "PostLN"},
    {"block": "gau", "key_size": 8, "expansion": 3, "placement": "ReZero"},
]


def _config(changes: dict[str, Any]) -> CausalLMConfig:
    return CausalLMConfig(vocab_size=40, dim=32, layers=3, train_length=16, **changes)


def products(model: nn.Module, *inputs: Tensor) -> int:
    """FLOPs of products with weights, which torch counts."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*inputs)
    counts = counter.get_flop_counts()["Global"]
    return sum(counts.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))


def assert_counted(model: nn.Module) -> None:
    distinct = {value.data_ptr(): value.numel() for value in model.state_dict().values()}
    assert parameter_count(model) == sum(distinct.values())


@pytest.mark.parametrize("changes", CONFIGS)
def test_a_language_model_costs_what_torch_counts(changes: dict[str, Any]) -> None:
    config, length = _config(changes), 12
    model = CausalLM(config)
    assert_counted(model)
    assert parameter_count(config) == parameter_count(model)
    weights = products(model, torch.zeros(2, length, dtype=torch.int64))
    assert flops_per_token(config, length).weights * 2 * length == weights
    with pytest.raises(InputError, match="at least 1"):
        flops_per_token(config, 0)


@pytest.mark.parametrize(
    "changes",
    [{}, {"shared_vocabulary": False, "target_vocab": 30, "tie_head": False, "kv_heads": 1}],
)
def test_a_translator_costs_what_torch_counts(changes: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"source_vocab": 19, "dim": 16, "heads": 4, "train_length": 8}
    sizes |= {"layers": 2, "decoder_layers": 3, "feed_forward": "gelu", "norm_gain": False}
    config = TranslatorConfig(**{**sizes, "hidden": 40, "kv_heads": 2, **changes})
    model, s, t = Translator(config), 7, 5
    assert_counted(model)
    flops = translator_flops(config, s, t)
    assert 2 * flops.weights == products(model, torch.full((2, s), 3), torch.full((2, t), 3))
    assert flops.attention == 4 * 16 * (2 * s * s + 3 * (t * (t + 1) / 2 + s * t))
    assert flops.training == 3 * flops.forward


def test_a_vision_transformer_costs_what_torch_counts() -> None:
    sizes: dict[str, Any] = {"height": 8, "width": 12, "channels": 2, "classes": 5}
    config = VisionConfig(**sizes, dim=12, layers=2, heads=3)
    model = VisionTransformer(config)
    assert_counted(model)
    found = flops_per_image(config)
    assert found.weights == products(model, torch.zeros(1, 2, 8, 12))
    assert found.attention == 2 * 2 * 2 * config.tokens**2 * 12


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

"""The configuration: what it resolves and what it refuses, each with a sentence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from normattn.errors import InputError
from normattn.layers.norms import RMSNorm
from normattn.models import CausalLM
from normattn.models.config import CausalLMConfig
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
        ({"score": "KMA"}, "score: .*KNA"),
        ({"score": "KNA@128"}, "train_length of 128, but the model's is 64"),
        ({"score": "Baseline-YaRN"}, "needs factor"),
        ({"score": 3}, "score: .*3"),
        ({"score": "KBatchNorm"}, "see the future"),
        (
            {"shared_layers": True, "score": "KNA-NoPEEvery(every=2)"},
            "differs from layer to layer, but with shared_layers",
        ),
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


def test_a_missing_setting_is_named() -> None:
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
    ids = torch.randint(2048, (16, 33))
    quiet: dict[str, Any] = {"embedding_std": 0.02}
    losses = [
        float(CausalLM(CausalLMConfig(**settings, **more)).loss(ids).loss) for more in ({}, quiet)
    ]
    assert losses[0] > 9
    assert losses[1] == pytest.approx(math.log(2048), abs=0.1)
    dump = CausalLMConfig(**settings).model_dump(mode="json")
    assert "embedding_std" not in dump
    whole = CausalLMConfig(**settings, **quiet)
    assert CausalLMConfig(**whole.model_dump(mode="json")) == whole

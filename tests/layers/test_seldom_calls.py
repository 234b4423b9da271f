"""Calls that few make: empty batches, parametrised parameters, recomputation, wrong caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from normattn import InputError, Score, ScoreSpec, attention
from normattn.kernels import BACKENDS
from normattn.kernels.stats import observing
from normattn.lab.diagnostics import Collector, layer_names
from normattn.layers.cache import KeyValueCache
from normattn.models import CausalLM, CausalLMConfig
from normattn.models.transformer import set_activation_checkpointing
from score.cases import built, tensors
from score.recipe import Recipe

SIZES: dict[str, Any] = {"vocab_size": 11, "dim": 16, "layers": 2, "heads": 2, "train_length": 8}


class Same(nn.Module):
    """A parametrisation that changes nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize(
    ("name", "module", "parameter"),
    [("QKRMSNorm(gain=true)", "query_norm", "weight"), ("QKNorm2020", "", "scale")],
)
def test_a_parametrised_parameter_counts(name: str, module: str, parameter: str) -> None:
    score = Score(ScoreSpec.parse(name, train_length=64), 2, 8).double()
    owner = score.get_submodule(module)
    getattr(owner, parameter).data.mul_(3)
    q, k, v = torch.randn(3, 1, 2, 6, 8, dtype=torch.float64)
    before = attention(q, k, v, score)
    parametrize.register_parametrization(owner, parameter, Same())
    torch.testing.assert_close(attention(q, k, v, score), before)
    attention(q, k, v, score).sum().backward()  # type: ignore[no-untyped-call]
    assert all(each.grad is not None for each in owner.parameters())


@pytest.mark.parametrize(
    "name", ["Baseline-ReRoPE(window=4)", "Baseline-SelfExtend(group=2,window=4)", "Baseline-ALiBi"]
)
def test_an_empty_batch_gives_an_empty_result(name: str) -> None:
    q, k, v = torch.zeros(3, 0, 2, 5, 8)
    assert attention(q, k, v, name).shape == (0, 2, 5, 8)
    padding = torch.zeros(0, 5, dtype=torch.bool)
    assert attention(q, k, v, name, key_padding=padding).shape == (0, 2, 5, 8)


RECIPES = [
    Recipe("KNA", "logn", train_length=4),
    Recipe("Baseline", method="DynamicNTK"),
    Recipe("Baseline", method="ReRoPE", window=2),
    Recipe("Baseline", method="StreamingLLM"),
    Recipe("QKRMSNorm", "", "none", bias="KERPLELog", sink=True, cap=2.0),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=[r.text for r in RECIPES])
@pytest.mark.parametrize("keys", [0, 7])
def test_no_query_is_an_empty_result_by_every_kernel(recipe: Recipe, keys: int) -> None:
    q, k, v = tensors((2, 2, 0, 4), (2, 1, keys, 4), (2, 1, keys, 4))
    score, served = built(recipe, 2, 4, 1), set()
    for backend in BACKENDS:
        try:
            out = attention(q, k, v, score, backend=backend)
        except InputError as refusal:
            if "kernel cannot serve this" not in str(refusal):
                raise
            continue
        served.add(backend)
        assert out.shape == (2, 2, 0, 4)
        out.sum().backward()  # type: ignore[no-untyped-call]
        assert k.grad is not None
        assert not k.grad.any()
    assert {"auto", "chunked", "reference"} <= served


@pytest.mark.parametrize("backend", ["auto", "chunked", "strips", "reference"])
@pytest.mark.parametrize("first", [-20, -5, 1 << 40])
def test_a_bias_of_distances_does_not_depend_on_the_first_position(
    backend: str, first: int
) -> None:
    """Also where the first position is below 0, or so far that no table could reach it."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 9, 8)
    at = torch.arange(9) + first
    moved = attention(q, k, v, "KNA-ALiBi", q_positions=at, k_positions=at, backend=backend)
    torch.testing.assert_close(moved, attention(q, k, v, "KNA-ALiBi", backend="reference"))


def test_blocks_far_apart_are_computed_without_those_between() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 4, 8, dtype=torch.float64)
    far = torch.tensor([0, 1, 1 << 40, (1 << 40) + 1])
    out = attention(q, k, v, "KNA-DynamicNTK@8", q_positions=far, k_positions=far)
    first = attention(q[:, :, :2], k[:, :, :2], v[:, :, :2], "KNA")
    torch.testing.assert_close(out[:, :, :2], first)
    assert out.isfinite().all()


@pytest.mark.parametrize(
    "name",
    [
        *("Baseline-HoPE(base=77)@16", "Baseline-XPos(scale=77)", "Baseline-NTKMixed(factor=7.7)"),
        *("Baseline-ClippedRoPE(clip=2)", "Baseline-LongRoPE(factor=7.7)@16", "Baseline-DroPE"),
        *("Baseline-YaRN(factor=7.7)@16", "Baseline-ALiBi"),
    ],
)
def test_the_default_device_does_not_matter(name: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    with torch.device("meta"):
        out = attention(q, k, v, name)
    torch.testing.assert_close(out, attention(q, k, v, name, backend="reference"))


@pytest.mark.parametrize("score", ["Baseline", "KNA-ALiBi", "QKLayerNorm-ReRoPE(window=3)"])
def test_recomputed_blocks_use_the_kernels_of_the_forward_pass(score: str) -> None:
    torch.manual_seed(0)
    model = CausalLM(CausalLMConfig(**{**SIZES, "score": score})).double()
    ids = torch.randint(0, 11, (2, 8))
    gradients = []
    for on in (False, True):
        set_activation_checkpointing(model, on)
        for backend in ("auto", "reference"):
            model.zero_grad()
            with observing(Collector(layer_names(model))):
                loss = model(ids, backend=backend).square().mean()
            loss.backward()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for other in gradients[1:]:
        torch.testing.assert_close(gradients[0], other, rtol=1e-8, atol=1e-10)


def test_a_cache_takes_a_key_for_each_query_and_values_of_one_size() -> None:
    score = Score(ScoreSpec.parse("Baseline-ALiBi"), 2, 8)
    cache, x = KeyValueCache(), torch.randn(1, 2, 3, 8)
    with torch.no_grad():
        attention(x, x, x, score, cache=cache)
        with pytest.raises(InputError, match="2 queries and 3 keys"):
            attention(x[:, :, :2], x, x, score, cache=cache)
        with pytest.raises(InputError, match="2 heads of size 8"):
            attention(x, x, x[..., :4], score, cache=cache)
        assert cache.length == 3
        attention(x, x, x, score, cache=cache)
    assert cache.length == 6

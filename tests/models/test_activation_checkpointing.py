"""Activations that are computed again give the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.models import CausalLM, CausalLMConfig, MaskedLM, MaskedLMConfig, Translator
from normattn.models.config import TranslatorConfig
from normattn.models.transformer import set_activation_checkpointing
from normattn.score import ScoreSpec
from normattn.score.parts import parts

STACK: dict[str, Any] = {"dim": 16, "layers": 3, "heads": 4, "train_length": 12}
IDS = torch.arange(26).view(2, 13) * 5 % 9
Case = tuple[nn.Module, Callable[[], Tensor]]


def causal(**changes: Any) -> Case:
    model = CausalLM(CausalLMConfig(**{**STACK, "vocab_size": 9, **changes})).double()
    return model, lambda: model.loss(IDS).loss


def masked(**changes: Any) -> Case:
    model = MaskedLM(MaskedLMConfig(**{**STACK, "vocab_size": 9, **changes})).double()
    places = torch.tensor([[0, 3], [2, 5]])
    return model, lambda: model.loss(IDS, places, places).loss


def translator(**changes: Any) -> Case:
    model = Translator(TranslatorConfig(**{**STACK, "source_vocab": 9, **changes})).double()
    source = torch.tensor([[3, 4, 5, 2], [6, 7, 2, 0]])
    target = torch.tensor([[1, 8, 7, 2], [1, 5, 2, 0]])
    return model, lambda: model.loss(source, target).loss


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(1)  # Of dropout.
    model.zero_grad()
    loss().backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.clone() for name, grad in found.items()}


def assert_same_without_checkpointing(model: nn.Module, loss: Callable[[], Tensor]) -> None:
    """Gradients and running statistics of a step are those without recomputation."""
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    wanted = gradients(model, loss)
    after = {name: value.clone() for name, value in model.named_buffers()}
    model.load_state_dict(buffers, strict=False)
    set_activation_checkpointing(model)
    found = gradients(model, loss)
    assert wanted.keys() == found.keys()
    for name, grad in wanted.items():
        assert torch.allclose(found[name], grad, rtol=1e-10, atol=1e-12), name
    for name, value in model.named_buffers():
        assert torch.equal(value, after[name]), name


def score_with(part: str) -> ScoreSpec:
    """The first score that has a part, from the plainest on."""
    settings = ("", "(factor=2)", "(group=2)", "(s=2)")
    plainest = (f"{text}{more}" for more in settings for text in (part, f"Baseline-{part}"))
    for text in (*plainest, f"QKRMSNorm-{part}"):
        try:
            return ScoreSpec.parse(text).resolve(train_length=12)
        except InputError:
            continue
    raise AssertionError(part)


@pytest.mark.parametrize("part", sorted(parts()))
def test_every_part_of_a_score_can_be_computed_again(part: str) -> None:
    torch.manual_seed(0)
    spec = score_with(part)
    make = masked if spec.leaks_future else causal
    assert_same_without_checkpointing(*make(score=spec, layers=2, kv_heads=2))


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (causal, {"score": "KNA-logn", "dropout": 0.3}),
        (causal, {"score": "KNA-ResidualQK", "shared_layers": True}),
        (causal, {"score": "KNA-ResidualQK", "block": "gau", "heads": 1}),
        (causal, {"score": "Baseline-SlidingWindow(window=4)-Sink-FoX"}),
        (causal, {"score": "Baseline-ValueResidual", "placement": "AttnRes"}),
        (translator, {"score": "Baseline-RealFormer"}),
        (translator, {"score": "Baseline-ResidualQKV"}),
    ],
)
def test_models_and_settings_that_share_or_draw(
    make: Callable[..., Case], changes: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    assert_same_without_checkpointing(*make(**changes))


def test_less_is_kept_for_the_backward_pass() -> None:
    torch.manual_seed(0)
    model, loss = causal(layers=8, score="KNA-RealFormer")

    def kept() -> int:
        held: list[int] = []

        def pack(x: Tensor) -> Tensor:
            held.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss()
        return sum(held)

    before = kept()
    set_activation_checkpointing(model)
    assert kept() < before / 4
    set_activation_checkpointing(model, on=False)
    assert kept() == before

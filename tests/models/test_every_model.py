"""Of every model: by any kernel, and with activations computed again, the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.models import CausalLM, CausalLMConfig, MaskedLM, MaskedLMConfig, Translator
from normattn.models.classifier import Classifier
from normattn.models.config import ClassifierConfig, TranslatorConfig, VisionConfig
from normattn.models.transformer import set_activation_checkpointing
from normattn.models.vision_transformer import VisionTransformer
from normattn.score import ScoreSpec
from normattn.score.parts import parts

SIZES: dict[str, Any] = {"dim": 16, "layers": 3, "heads": 4}
TEXT: dict[str, Any] = {**SIZES, "train_length": 12, "vocab_size": 9}
SIDES: dict[str, Any] = {**SIZES, "train_length": 12, "source_vocab": 9}
IDS = torch.arange(26).view(2, 13) * 5 % 9
SOURCE = torch.tensor([[3, 4, 5, 2], [6, 7, 2, 0]])
TARGET = torch.tensor([[1, 8, 7, 2], [1, 5, 2, 0]])
Case = tuple[nn.Module, Callable[..., Tensor]]
Make = Callable[..., Case]
Changes = dict[str, Any]


def causal(**changes: Any) -> Case:
    model = CausalLM(CausalLMConfig(**{**TEXT, **changes})).double()
    return model, lambda **how: model.loss(IDS, **how).loss


def masked(**changes: Any) -> Case:
    model = MaskedLM(MaskedLMConfig(**{**TEXT, **changes})).double()
    places = torch.tensor([[0, 3], [2, 5]])
    return model, lambda **how: model.loss(IDS, places, places, **how).loss


def classifier(**changes: Any) -> Case:
    model = Classifier(ClassifierConfig(**{**TEXT, "labels": 3, **changes})).double()
    padding = torch.arange(13) >= torch.tensor([13, 8])[:, None]
    return model, lambda **how: model.loss(IDS, padding, torch.ones(2, 3), **how)


def vision(**changes: Any) -> Case:
    sizes = {**SIZES, "height": 8, "width": 8, "classes": 3}
    model = VisionTransformer(VisionConfig(**{**sizes, **changes})).double()
    images = torch.linspace(-1, 1, 128, dtype=torch.float64).view(2, 1, 8, 8)
    return model, lambda **how: model.loss(images, torch.tensor([0, 2]), **how).loss


def translator(**changes: Any) -> Case:
    model = Translator(TranslatorConfig(**{**SIDES, **changes})).double()
    return model, lambda **how: model.loss(SOURCE, TARGET, **how).loss


@pytest.mark.parametrize(
    ("make", "changes"),
    [(each, {"score": "KNA-logn"}) for each in (causal, classifier, translator)]
    + [(masked, {"score": "KNA-logn", "exits": True}), (vision, {})],
)
def test_the_reference_gives_the_same_loss_and_derivatives(make: Make, changes: Changes) -> None:
    torch.manual_seed(0)
    model, loss = make(**changes)
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = []
    for backend in ("auto", "reference"):
        value = loss(backend=backend)
        grads = torch.autograd.grad(value, parameters, allow_unused=True)
        found.append([value.detach(), *(g for g in grads if g is not None)])
    assert len(found[0]) == len(found[1]) > 10
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-9)
    weight = next(p for name, p in model.named_parameters() if "qkv" in name)
    (first,) = torch.autograd.grad(loss(backend="reference"), weight, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), weight)
    assert bool(torch.isfinite(second).all())
    assert bool(second.any())
    with pytest.raises(InputError, match="nonsense"):
        loss(backend="nonsense")


# Activations that are computed again.


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(1)  # Of dropout.
    model.zero_grad()
    loss().backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad for name, p in model.named_parameters()}
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def assert_same_without_checkpointing(model: nn.Module, loss: Callable[[], Tensor]) -> None:
    """Gradients and running statistics of a step are those without recomputation."""
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    wanted = gradients(model, loss)
    after = {name: value.clone() for name, value in model.named_buffers()}
    model.load_state_dict(buffers, strict=False)
    set_activation_checkpointing(model)
    found = gradients(model, loss)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(dict(model.named_buffers()), after, rtol=0, atol=0)


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
def test_models_and_settings_that_share_or_draw(make: Make, changes: Changes) -> None:
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
    with pytest.raises(InputError, match="needs a model of normattn's blocks"):
        set_activation_checkpointing(nn.Linear(2, 2))

"""Every model takes the kernel that it is told: the same values, every derivative, or a refusal."""

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
from normattn.models.vision_transformer import VisionTransformer

STACK: dict[str, Any] = {"dim": 16, "layers": 2, "heads": 2}
TEXT: dict[str, Any] = {**STACK, "train_length": 8, "score": "KNA-logn", "vocab_size": 11}
IDS = torch.arange(12).view(2, 6) % 11
SIDES: dict[str, Any] = {"source_vocab": 11, "train_length": 8, "score": "KNA-logn"}
Loss = Callable[..., Tensor]


def causal() -> tuple[nn.Module, Loss]:
    model = CausalLM(CausalLMConfig(**TEXT))
    return model, lambda **how: model.loss(IDS, **how).loss


def masked() -> tuple[nn.Module, Loss]:
    model = MaskedLM(MaskedLMConfig(**TEXT, exits=True))
    places = torch.tensor([[0, 2], [1, 4]])
    return model, lambda **how: model.loss(IDS, places, places, **how).loss


def classifier() -> tuple[nn.Module, Loss]:
    model = Classifier(ClassifierConfig(**TEXT, labels=3))
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    return model, lambda **how: model.loss(IDS, padding, torch.ones(2, 3), **how)


def vision() -> tuple[nn.Module, Loss]:
    model = VisionTransformer(VisionConfig(**STACK, height=8, width=8, classes=3))
    images = torch.linspace(-1, 1, 128, dtype=torch.float64).view(2, 1, 8, 8)
    return model.double(), lambda **how: model.loss(images, torch.tensor([0, 2]), **how).loss


def translator() -> tuple[nn.Module, Loss]:
    model = Translator(TranslatorConfig(**STACK, **SIDES))
    source = torch.tensor([[3, 4, 5, 2], [6, 7, 2, 0]])
    target = torch.tensor([[1, 8, 9, 2], [1, 5, 2, 0]])
    return model, lambda **how: model.loss(source, target, **how).loss


MODELS = [causal, masked, classifier, vision, translator]


@pytest.mark.parametrize("make", MODELS)
def test_the_reference_gives_the_same_loss_and_every_derivative(
    make: Callable[[], tuple[nn.Module, Loss]],
) -> None:
    torch.manual_seed(0)
    model, loss = make()
    model.double()
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = []
    for backend in ("auto", "reference"):
        value = loss(backend=backend)
        grads = torch.autograd.grad(value, parameters, allow_unused=True)
        found.append([value.detach(), *(g for g in grads if g is not None)])
    assert len(found[0]) == len(found[1]) > 10
    for ours, reference in zip(*found, strict=True):
        assert torch.allclose(ours, reference, rtol=1e-6, atol=1e-9)
    weight = next(p for name, p in model.named_parameters() if "qkv" in name)
    (first,) = torch.autograd.grad(loss(backend="reference"), weight, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), weight)
    assert bool(torch.isfinite(second).all())
    assert bool(second.any())
    with pytest.raises(InputError, match="nonsense"):
        loss(backend="nonsense")

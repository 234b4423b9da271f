"""Activations that are computed again give the same gradients, for every score."""

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
from normattn.score.parts import Slot, parts

SIZES: dict[str, Any] = {"dim": 16, "layers": 3, "heads": 4, "train_length": 12, "vocab_size": 9}
IDS = torch.arange(26).view(2, 13) * 5 % 9


def names() -> list[str]:
    """A score for every registered part that can be trained by itself."""
    texts = [
        name if part.slot is Slot.VARIANT else f"Baseline-{name}" for name, part in parts().items()
    ]
    texts += ["KNA-logn-ResidualQK", "QKRMSNorm-RealFormer", "CosA-logn-YaRN(factor=2)"]
    return [text for text in texts if _config(text) is not None]


def _config(score: str) -> CausalLMConfig | MaskedLMConfig | None:
    for kind in (CausalLMConfig, MaskedLMConfig):
        try:
            return kind(**{**SIZES, "score": score})
        except InputError:
            continue
    return None


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(1)  # Of dropout.
    model.zero_grad()
    loss().backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.clone() for name, grad in found.items()}


def same_with_and_without(model: nn.Module, loss: Callable[[], Tensor]) -> None:
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


@pytest.mark.parametrize("score", names())
def test_gradients_and_running_statistics_are_the_same(score: str) -> None:
    torch.manual_seed(0)
    config = _config(score)
    if isinstance(config, CausalLMConfig):
        causal = CausalLM(config).double()
        same_with_and_without(causal, lambda: causal.loss(IDS).loss)
    else:
        assert config is not None
        masked = MaskedLM(config).double()
        places = torch.tensor([[0, 3], [2, 5]])
        same_with_and_without(masked, lambda: masked.loss(IDS, places, places).loss)


def test_every_kind_of_part_is_among_them() -> None:
    assert len(names()) > 45
    assert {"KNA", "QKBatchNorm", "Baseline-RealFormer", "Baseline-ResidualQKV"} <= {*names()}


@pytest.mark.parametrize("changes", [{"shared_layers": True}, {"dropout": 0.3}, {"block": "gau"}])
def test_other_stacks(changes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    sizes = {**SIZES, "heads": 1} if "block" in changes else SIZES
    model = CausalLM(CausalLMConfig(**{**sizes, **changes, "score": "KNA-ResidualQK"})).double()
    same_with_and_without(model, lambda: model.loss(IDS).loss)


@pytest.mark.parametrize("score", ["Baseline-RealFormer", "Baseline-ResidualQKV"])
def test_a_translators_two_stacks(score: str) -> None:
    torch.manual_seed(0)
    sizes = {name: SIZES[name] for name in ("dim", "layers", "heads", "train_length")}
    model = Translator(TranslatorConfig(**{**sizes, "source_vocab": 9, "score": score})).double()
    source = torch.tensor([[3, 4, 5, 2], [6, 7, 2, 0]])
    target = torch.tensor([[1, 8, 7, 2], [1, 5, 2, 0]])
    same_with_and_without(model, lambda: model.loss(source, target).loss)


def test_less_is_kept_for_the_backward_pass() -> None:
    torch.manual_seed(0)
    model = CausalLM(CausalLMConfig(**{**SIZES, "layers": 8, "score": "KNA-RealFormer"}))

    def kept() -> int:
        held: list[int] = []

        def pack(x: Tensor) -> Tensor:
            held.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model.loss(IDS)
        return sum(held)

    before = kept()
    set_activation_checkpointing(model)
    assert kept() < before / 4
    set_activation_checkpointing(model, on=False)
    assert kept() == before


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(InputError, match="Linear"):
        set_activation_checkpointing(nn.Linear(2, 2))

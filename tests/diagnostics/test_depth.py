"""What changes with depth, against plain matrices made from the model's own weights."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data.helpers import make_split
from normattn.lab.data.batches import Masking
from normattn.lab.data.windows import masked_set
from normattn.lab.diagnostics.depth import SAMPLED, layer_gradients, measure_depth
from normattn.lab.evaluation.masked import documents_of
from normattn.layers.attention import Attention
from normattn.models.config import MaskedLMConfig
from normattn.models.masked_lm import MaskedLM

LENGTH = 24
SPLIT = make_split([60, 30, 90])
TEXTS = masked_set(SPLIT, LENGTH, Masking(), 200, max_windows=5, seed=1)


def _model(**changes: Any) -> MaskedLM:
    values: dict[str, Any] = {"vocab_size": 200, "dim": 16, "layers": 4, "heads": 2}
    values |= {"train_length": LENGTH, "placement": "PostLN", "exits": True, "dropout": 0.2}
    values |= {"score": "Baseline-NoPE"}
    torch.manual_seed(0)
    return MaskedLM(MaskedLMConfig(**{**values, **changes})).double()


def _attention(model: MaskedLM, ids: Tensor, residual: bool) -> list[Tensor]:
    """The weights (B, H, T, T) of every layer, from hooks on what its attention reads."""
    read: list[Tensor] = []
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    handles = [each.register_forward_pre_hook(lambda m, x: read.append(x[0])) for each in layers]
    model.eval()
    with torch.no_grad():
        model.hidden(ids)
    model.train()
    for handle in handles:
        handle.remove()
    found, total = [], torch.zeros(())
    for x, layer in zip(read, layers * (len(read) // len(layers)), strict=True):
        q, k, _ = layer.qkv(x).chunk(3, -1)
        q, k = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in (q, k))
        score = q @ k.transpose(-1, -2) / 8**0.5
        total = total + score if residual else score
        found.append(total.softmax(-1).detach())
    return found


def _expected(attention: list[Tensor]) -> dict[str, Tensor]:
    rows = np.linspace(0, LENGTH - 1, SAMPLED).astype(int)
    entropy = [-(a * a.log()).sum(-1).mean((1, 2)) for a in attention]
    pairs = list(pairwise(attention))
    near = [1 - 0.5 * (a - b).abs().sum(-1)[:, :, rows].mean((1, 2)) for a, b in pairs]
    means = [(a.mean(1), b.mean(1)) for a, b in pairs]
    mean = [1 - 0.5 * (a - b).abs().sum(-1)[:, rows].mean(1) for a, b in means]
    named = {"entropy": entropy, "agreement": near, "agreement_mean": mean}
    return {name: torch.stack(values, -1) for name, values in named.items()}


@pytest.mark.parametrize(
    ("score", "shared"),
    [("Baseline-NoPE", False), ("Baseline-NoPE-RealFormer", False), ("Baseline-NoPE", True)],
)
def test_against_plain_matrices(score: str, shared: bool) -> None:
    model = _model(score=score, shared_layers=shared)
    names, place = documents_of(TEXTS)
    ids = torch.from_numpy(TEXTS.rows.ids)
    found = measure_depth(model, TEXTS, place, tokens_per_batch=2 * LENGTH)
    expected = _expected(_attention(model, ids, "RealFormer" in score))
    outputs: list[Tensor] = []
    model.eval()
    with torch.no_grad():
        model.hidden(ids, after=lambda layer, x: outputs.append(x))
    expected["variance"] = torch.stack(
        [(x - x.mean(-1, keepdim=True)).square().mean((1, 2)) for x in outputs], -1
    )
    for name, each_text in expected.items():
        sums = np.zeros((len(names), each_text.shape[-1]))
        np.add.at(sums, place, each_text.numpy())
        np.testing.assert_allclose(found[name], sums, rtol=0, atol=1e-6, err_msg=name)


def test_gradients_are_those_of_the_loss() -> None:
    model = _model()
    found = layer_gradients(model, TEXTS, rows=3)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.eval()
    for batch, rows in zip(found, (slice(0, 3), slice(3, 5)), strict=True):
        ids, places, targets = (torch.from_numpy(each[rows]) for each in TEXTS.rows)
        logits = torch.take_along_dim(model(ids), places[..., None], 1)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        for layer, norm in enumerate(batch):
            grads = torch.autograd.grad(
                loss, list(model.blocks[layer].parameters()), retain_graph=True
            )
            assert norm == pytest.approx(float(sum(g.square().sum() for g in grads)) ** 0.5)
    assert layer_gradients(_model(shared_layers=True), TEXTS, 3) == []

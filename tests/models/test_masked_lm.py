"""The masked language model: what it reads, its loss, its exits, its files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normattn.errors import InputError
from normattn.layers.residual import ReZero
from normattn.models.config import MaskedLMConfig
from normattn.models.masked_lm import MaskedLM

VOCABULARY, LENGTH = 23, 12


def _model(**changes: Any) -> MaskedLM:
    values = {"vocab_size": VOCABULARY, "dim": 16, "layers": 3, "heads": 4, "train_length": LENGTH}
    torch.manual_seed(0)
    model = MaskedLM(MaskedLMConfig(**{**values, **changes})).double()
    for module in model.modules():
        if isinstance(module, ReZero):  # Away from the identity, so that tests see the layers.
            nn.init.constant_(module.alpha, 0.7)
    return model


def _text(rows: int = 3, length: int = LENGTH, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY + 1, (rows, length), generator=generator)
    places = torch.stack([torch.randperm(length, generator=generator)[:3] for _ in range(rows)])
    return ids, places, torch.randint(0, VOCABULARY, (rows, 3), generator=generator)


def _expected(model: MaskedLM, x: Tensor, places: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and hits by whole logits and torch's own cross-entropy."""
    head = model.embedding.weight[:VOCABULARY] if model.head is None else model.head.weight
    logits = torch.stack([x[row, places[row]] for row in range(len(x))]) @ head.T
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return loss.view(targets.shape), logits.argmax(-1) == targets


@pytest.mark.parametrize(
    ("placement", "shared"),
    [("PostLN", True), *((each, False) for each in ("PreLN", "DeepNorm", "FixedScale", "AttnRes"))],
)
def test_loss_and_scores_are_those_of_the_logits(placement: str, shared: bool) -> None:
    model = _model(placement=placement, exits=True, shared_layers=shared, tie_head=not shared)
    ids, places, targets = _text()
    outputs: list[Tensor] = []
    hidden = model.hidden(ids, after=lambda layer, x: outputs.append(x))
    assert len(outputs) == 4
    losses, hits = _expected(model, hidden, places, targets)
    found = model.loss(ids, places, targets)
    torch.testing.assert_close(found.loss, losses.mean(), rtol=0, atol=1e-12)
    assert found.correct == hits.sum()
    assert found.tokens == 9
    scores = model.token_scores(ids, places, targets)
    torch.testing.assert_close(scores.loss, losses.detach(), rtol=0, atol=1e-12)
    assert torch.equal(scores.correct, hits)
    for exit_, x, below, count in zip(
        model.exits, outputs[1:-1], scores.exit_correct, found.exit_correct, strict=True
    ):
        _, expected = _expected(model, exit_(x), places, targets)
        assert torch.equal(below, expected)
        assert count == expected.sum()
    logits = model(ids)
    assert logits.shape == (3, LENGTH, VOCABULARY)
    torch.testing.assert_close(logits.argmax(-1).gather(1, places) == targets, hits, rtol=0, atol=0)


def test_padding_changes_nothing_and_its_targets_are_not_counted() -> None:
    model = _model(score="KNA-logn", exits=True, placement="PostLN")
    ids, places, targets = _text(2)
    places[1] = torch.tensor([1, 3, 0])
    targets[1, 2] = -1
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    padding[1, 8:] = True
    found = model.loss(ids, places, targets, padding)
    alone = [model.token_scores(ids[:1], places[:1], targets[:1])]
    alone += [model.token_scores(ids[1:, :8], places[1:, :2], targets[1:, :2])]
    losses = torch.cat([each.loss.flatten() for each in alone])
    assert found.tokens == len(losses) == 5
    torch.testing.assert_close(found.loss.detach(), losses.mean(), rtol=0, atol=1e-9)
    assert found.correct == sum(int(each.correct.sum()) for each in alone)
    scores = model.token_scores(ids, places, targets, padding)
    assert scores.loss[1, 2] == 0
    torch.testing.assert_close(scores.loss[targets >= 0], losses, rtol=0, atol=1e-9)
    assert scores.exit_correct.sum() == sum(int(each.exit_correct.sum()) for each in alone)


@pytest.mark.parametrize("placement", ["PreLN", "PostLN"])
def test_exits_leave_the_stack_as_it_is(placement: str) -> None:
    text = _text()
    models = [_model(placement=placement, exits=exits, dropout=0.1) for exits in (True, False)]
    losses = []
    for model in models:
        torch.manual_seed(5)
        losses.append(model.loss(*text).loss)
        torch.autograd.backward(losses[-1])
    assert torch.equal(*losses)
    with_exits, without = (dict(model.named_parameters()) for model in models)
    for name, parameter in without.items():
        assert torch.equal(parameter, with_exits[name])
        assert parameter.grad is not None
        torch.testing.assert_close(with_exits[name].grad, parameter.grad, rtol=0, atol=0)
    assert all(p.grad is not None and p.grad.norm() > 0 for p in models[0].exits.parameters())


def test_bad_input() -> None:
    model = _model()
    with pytest.raises(InputError, match=r"from 0 to 24; .* 0 to 23"):
        model(torch.tensor([[0, VOCABULARY + 1]]))
    with pytest.raises(InputError, match="only one layer"):
        _model(layers=1, exits=True)
    with pytest.raises(InputError, match="causal attention only"):
        _model(score="Baseline-ReRoPE(window=4)")
    text, one = torch.zeros(1, 6, dtype=torch.long), torch.ones(1, 1, dtype=torch.long)
    for places, targets, said in (
        (6 * one, one, "places run from 6 to 6; expected 0 to 5"),
        (-one, one, "places run from -1 to -1"),
        (one, VOCABULARY * one, "targets run from 23 to 23; expected 0 to 22"),
        (one, torch.ones(1, 2), "targets must be int64"),
        (one[:, :0], one[:, :0], "no target"),
    ):
        with pytest.raises(InputError, match=said):
            model.loss(text, places, targets)

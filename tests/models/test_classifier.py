"""The classifier: padding and neighbours that do not matter, its loss, its file."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from normattn.errors import InputError
from normattn.models.classifier import Classifier
from normattn.models.config import ClassifierConfig
from normattn.models.pretrained import load_as, save_model

SIZES: dict[str, Any] = {"dim": 16, "layers": 2, "heads": 2, "train_length": 12}


@lru_cache
def make(**changes: Any) -> Classifier:
    """A small classifier in float64."""
    torch.manual_seed(0)
    config = ClassifierConfig(**{**SIZES, "vocab_size": 30, "labels": 5, **changes})
    model = Classifier(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def documents(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(30, (len(lengths), max(lengths)), generator=generator)
    return ids, torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]


@settings(max_examples=5, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 4), st.integers(0, 99))
def test_padding_and_neighbours_change_nothing(lengths: list[int], more: int, seed: int) -> None:
    model = make()
    ids, padding = documents(lengths, seed)
    together = model(ids, padding)
    for row, length in enumerate(lengths):
        alone = model(ids[row : row + 1, :length])
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-9, atol=1e-10)
    wider = torch.nn.functional.pad(ids, (0, more), value=7)
    hidden = torch.nn.functional.pad(padding, (0, more), value=True)
    torch.testing.assert_close(model(wider, hidden), together, rtol=1e-9, atol=1e-10)


def test_the_loss_is_binary_cross_entropy_over_texts_and_labels() -> None:
    model, (ids, padding) = make(), documents([4, 2, 6])
    wanted = torch.tensor([[1.0, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).double()
    p = torch.sigmoid(model(ids, padding))
    expected = -(wanted * p.log() + (1 - wanted) * (1 - p).log()).mean()
    found = model.loss(ids, padding, wanted)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_a_saved_classifier_comes_back(tmp_path: Path) -> None:
    model = make(norm="layer", labels=4).float()
    save_model(model, tmp_path / "model")
    again = load_as(Classifier, tmp_path / "model")
    ids, padding = documents([4, 7])
    assert again.config == model.config
    assert torch.equal(again(ids, padding), model(ids, padding))
    with pytest.raises(InputError, match="from 1 to 30; this model's vocabulary is 0 to 29"):
        again(torch.tensor([[1, 30]]))
    labels = torch.tensor([[0, 1, 0, 1], [1, 1, 0, 0]])
    torch.testing.assert_close(
        again.loss(ids, padding, labels), again.loss(ids, padding, labels.float())
    )

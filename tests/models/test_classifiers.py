"""Classifiers of images against their parts, of texts beside padding; and what they refuse."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from normattn.errors import InputError
from normattn.models.classifier import Classifier
from normattn.models.config import ClassifierConfig, VisionConfig
from normattn.models.transformer import AttentionContext
from normattn.models.vision_transformer import VisionTransformer

HEIGHT, WIDTH, CLASSES = 8, 12, 5


def model(**changes: Any) -> Any:
    sizes = {"height": HEIGHT, "width": WIDTH, "channels": 2, "classes": CLASSES}
    values = {"dim": 12, "layers": 2, "heads": 3, **sizes, **changes}
    torch.manual_seed(0)
    return moved(VisionTransformer(VisionConfig(**values)).double())


@torch.no_grad()
def moved(made: Any) -> Any:
    """Away from zeros and ones, so that every parameter shows."""
    for parameter in made.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def batch(rows: int = 3, channels: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(rows, channels, HEIGHT, WIDTH, generator=generator, dtype=torch.float64)
    return images * 2 - 1, torch.randint(0, CLASSES, (rows,), generator=generator)


@pytest.mark.parametrize("placement", ["PreLN", "PostLN"])
@pytest.mark.parametrize("pool", ["class", "mean"])
def test_images_pass_a_convolution_and_the_blocks(pool: str, placement: str) -> None:
    made = model(pool=pool, placement=placement)
    images, labels = batch()
    patch, position = made.config.patch, made.position
    assert position is not None
    kernel = made.patches.weight.view(-1, 2, patch, patch)
    x = F.conv2d(images, kernel, made.patches.bias, stride=patch).flatten(2).mT
    if made.class_token is not None:
        x = torch.cat([made.class_token.expand(len(x), 1, -1), x], 1)
    x = x + position.weight
    x = x if made.embedding_norm is None else made.embedding_norm(x)
    x = made.blocks(x, AttentionContext(causal=False))
    x = x if made.final_norm is None else made.final_norm(x)
    logits = made.head(x[:, 0] if pool == "class" else x.mean(1))
    torch.testing.assert_close(made(images), logits, rtol=0, atol=1e-11)
    result, expected = made.loss(images, labels), F.cross_entropy(logits, labels)
    torch.testing.assert_close(result.loss, expected, rtol=0, atol=1e-12)
    assert result.correct == (logits.argmax(-1) == labels).sum()
    wanted = list(made.parameters())
    ours, theirs = (torch.autograd.grad(x, wanted) for x in (result.loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_scores_of_images_do_not_depend_on_their_neighbours() -> None:
    """In evaluation mode, also with statistics over the batch, which training updated."""
    made = model(score="QKBatchNorm-NoPE", dropout=0.5)
    images, labels = batch(6)
    made.loss(images, labels)
    whole = made.scores(images, labels)
    assert made.training
    parts = [made.scores(images[i : i + 1], labels[i : i + 1]) for i in range(6)]
    torch.testing.assert_close(whole.loss, torch.cat([part.loss for part in parts]))
    logits = made.eval()(images)
    expected = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(whole.loss.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(whole.correct, logits.argmax(-1) == labels)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"patch": 5}, "images of 8 × 12 cannot be cut into patches of 5 × 5"),
        ({"classes": 1}, "classes: .*greater than or equal to 2"),
        ({"train_length": 8}, "train_length is 8, but an image has 7 tokens"),
        ({"height": "8"}, "height: .*integer"),
        ({"patch": 0}, "patch: .*greater than or equal to 1"),
        ({"score": "KNA-ReRoPE"}, "is defined for causal attention only"),
        ({"classs": 3}, "classs: there is no such setting"),
    ],
)
def test_bad_input(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        model(**changes)
    images, _ = batch(channels=1)
    with pytest.raises(InputError, match=r"2, 8, 12\)"):
        model()(images)
    images, _ = batch()
    with pytest.raises(InputError, match="images must be floating"):
        model()(images.to(torch.uint8))


# Texts.
SIZES: dict[str, Any] = {"dim": 16, "layers": 2, "heads": 2, "train_length": 12}


@lru_cache
def make() -> Any:
    torch.manual_seed(0)
    return moved(Classifier(ClassifierConfig(**SIZES, vocab_size=30, labels=5)).double())


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
    made, (ids, padding) = make(), documents([4, 2, 6])
    wanted = torch.tensor([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    p = torch.sigmoid(made(ids, padding))
    expected = -(wanted * p.log() + (1 - wanted) * (1 - p).log()).mean()
    for labels in (wanted, wanted.double()):
        torch.testing.assert_close(made.loss(ids, padding, labels), expected, rtol=1e-12, atol=0)
    with pytest.raises(InputError, match="from 1 to 30; this model's vocabulary is 0 to 29"):
        made(torch.tensor([[1, 30]]))

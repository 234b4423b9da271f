"""The Vision Transformer against its parts, and what it must refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from normattn.errors import InputError
from normattn.models.config import VisionConfig
from normattn.models.flops import flops_per_image
from normattn.models.transformer import AttentionContext
from normattn.models.vision_transformer import VisionTransformer

HEIGHT, WIDTH, CLASSES = 8, 12, 5


def model(**changes: Any) -> VisionTransformer:
    sizes = {"height": HEIGHT, "width": WIDTH, "channels": 2, "classes": CLASSES}
    values = {"dim": 12, "layers": 2, "heads": 3, **sizes, **changes}
    torch.manual_seed(0)
    made = VisionTransformer(VisionConfig(**values)).double()
    with torch.no_grad():  # Away from zeros and ones, so that every parameter shows.
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def batch(rows: int = 3, channels: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(rows, channels, HEIGHT, WIDTH, generator=generator, dtype=torch.float64)
    return images * 2 - 1, torch.randint(0, CLASSES, (rows,), generator=generator)


@pytest.mark.parametrize("placement", ["PreLN", "PostLN"])
@pytest.mark.parametrize("pool", ["class", "mean"])
def test_outputs_and_gradients_are_those_of_a_convolution_and_the_blocks(
    pool: str, placement: str
) -> None:
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


def test_flops_are_those_of_the_matrix_products() -> None:
    made = model()
    found, config = flops_per_image(made.config), made.config
    with FlopCounterMode(display=False) as counter:
        made(batch(1)[0])
    counts = counter.get_flop_counts()["Global"]
    weights = sum(counts.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    assert found.weights == weights
    assert found.attention == config.layers * 2 * 2 * config.tokens**2 * config.dim


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
    torch.testing.assert_close(
        whole.loss.double(), F.cross_entropy(logits, labels, reduction="none"), rtol=1e-5, atol=1e-5
    )
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

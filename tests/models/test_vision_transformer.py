"""The Vision Transformer against torch's own encoder, and what it must refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normattn.errors import InputError
from normattn.models.config import VisionConfig
from normattn.models.flops import flops_per_image
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


class Theirs(nn.Module):
    """A ViT of torch's parts: a convolution, an encoder, a linear head."""

    def __init__(self, ours: VisionTransformer) -> None:
        super().__init__()
        config = ours.config
        layer = nn.TransformerEncoderLayer(
            config.dim,
            config.heads,
            4 * config.dim,
            dropout=0.0,
            activation="gelu",
            layer_norm_eps=config.norm_eps,
            batch_first=True,
            norm_first=config.placement == "PreLN",
        )
        pre = config.placement == "PreLN"
        norm = nn.LayerNorm(config.dim, config.norm_eps)
        self.encoder = nn.TransformerEncoder(
            layer, config.layers, norm if pre else None, enable_nested_tensor=False
        )
        self.first = None if pre else nn.LayerNorm(config.dim, config.norm_eps)
        self.cut = nn.Conv2d(config.channels, config.dim, config.patch, config.patch)
        self.head = nn.Linear(config.dim, config.classes)
        self.token = nn.Parameter(torch.zeros(config.dim)) if config.pool == "class" else None
        self.place = nn.Parameter(torch.zeros(config.tokens, config.dim))
        self.double()

    def forward(self, images: Tensor) -> Tensor:
        x = self.cut(images).flatten(2).transpose(1, 2)
        if self.token is not None:
            x = torch.cat([self.token.expand(len(x), 1, -1), x], 1)
        x = x + self.place
        x = self.encoder(x if self.first is None else self.first(x))
        x = x[:, 0] if self.token is not None else x.mean(1)
        logits: Tensor = self.head(x)
        return logits

    def pairs(self, ours: VisionTransformer) -> list[tuple[Tensor, Tensor]]:
        """Each of our parameters beside torch's, which may be another shape of the same numbers."""
        assert ours.position is not None
        found: list[tuple[Tensor, Tensor]] = [
            (ours.patches.weight, self.cut.weight),
            (ours.patches.bias, _some(self.cut.bias)),
            (ours.position.weight, self.place),
            (ours.head.weight, self.head.weight),
            (ours.head.bias, self.head.bias),
        ]
        if ours.class_token is not None and self.token is not None:
            found.append((ours.class_token, self.token))
        ends = ((ours.final_norm, self.encoder.norm), (ours.embedding_norm, self.first))
        for mine, theirs in ends:
            if theirs is not None:
                found += _norms(mine, theirs)
        blocks: list[Any] = list(ours.blocks)
        layers: list[Any] = list(self.encoder.layers)
        for block, layer in zip(blocks, layers, strict=True):
            attention, feed_forward = block.mixer.sublayer, block.feed_forward.sublayer
            found += [
                (attention.qkv.weight, layer.self_attn.in_proj_weight),
                (attention.out.weight, layer.self_attn.out_proj.weight),
                (feed_forward.up.weight, layer.linear1.weight),
                (feed_forward.down.weight, layer.linear2.weight),
            ]
            found += _norms(block.mixer.norm, layer.norm1)
            found += _norms(block.feed_forward.norm, layer.norm2)
        return found


def _some(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


def _norms(ours: Any, theirs: Any) -> list[tuple[Tensor, Tensor]]:
    return [(ours.gain, theirs.weight), (ours.bias, theirs.bias)]


@pytest.mark.parametrize("placement", ["PreLN", "PostLN"])
@pytest.mark.parametrize("pool", ["class", "mean"])
def test_outputs_and_gradients_are_those_of_torchs_encoder(pool: str, placement: str) -> None:
    ours = model(pool=pool, placement=placement)
    theirs = Theirs(ours)
    pairs = theirs.pairs(ours)
    assert {id(mine) for mine, _ in pairs} == {id(parameter) for parameter in ours.parameters()}
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.zero_()  # Its linear layers have biases; ours have none.
        for mine, other in pairs:
            other.copy_(mine.reshape(other.shape))
    images, labels = batch()
    torch.testing.assert_close(ours(images), theirs(images), rtol=0, atol=1e-11)
    result = ours.loss(images, labels)
    expected = F.cross_entropy(theirs(images), labels)
    torch.testing.assert_close(result.loss, expected, rtol=0, atol=1e-12)
    assert result.correct == (theirs(images).argmax(-1) == labels).sum()
    by_ours = torch.autograd.grad(result.loss, [mine for mine, _ in pairs])
    by_theirs = torch.autograd.grad(expected, [other for _, other in pairs])
    for one, other in zip(by_ours, by_theirs, strict=True):
        torch.testing.assert_close(one, other.reshape(one.shape), rtol=0, atol=1e-11)


SCORES = [
    *("Baseline", "KNA-NoPE", "CosA-NoPE", "QKNorm2020-NoPE", "QKLayerNorm-NoPE", "KNA-logn"),
    *("QKRMSNorm-NoPE", "QKBatchNorm-NoPE", "QKInstanceNorm-NoPE", "Baseline-NoPE-ALiBi"),
]


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


def test_flops_are_those_of_the_matrix_products() -> None:
    """Those with weights as torch counts them, those of scores and values from their sizes."""
    from torch.utils.flop_counter import FlopCounterMode

    ours = model()
    images, _ = batch(1)
    with FlopCounterMode(display=False) as counter:
        Theirs(ours)(images)
    found, config = flops_per_image(ours.config), ours.config
    assert found.weights == counter.get_total_flops()
    assert found.attention == config.layers * 2 * 2 * config.tokens**2 * config.dim


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"patch": 5}, "images of 8 × 12 cannot be cut into patches of 5 × 5"),
        ({"classes": 1}, "classes: input should be greater than or equal to 2"),
        ({"train_length": 8}, "train_length is 8, but an image has 7 tokens"),
        ({"height": "8"}, "height: input should be a valid integer"),
        ({"patch": 0}, "patch: input should be greater than or equal to 1"),
        ({"score": "KNA-ReRoPE"}, "is defined for causal attention only"),
        ({"classs": 3}, "classs: there is no such setting"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        model(**changes)


def test_images_of_another_shape_are_refused() -> None:
    images, _ = batch(channels=1)
    with pytest.raises(InputError, match=r"expected|with \(2, 8, 12\) behind the batch"):
        model()(images)

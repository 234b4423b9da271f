"""QKNorm as its paper has it (arXiv 2010.04245), in every attention of an encoder–decoder.

softmax(g · Q̂ K̂ᵀ) V, rows of Q̂ and K̂ of length 1 head by head, g one learned number for each
attention layer, which starts at log₂(l² − l) with l the 97.5th-percentile length.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from normattn.models.config import TranslatorConfig
from normattn.models.translator import Translator
from normattn.score import Score

WORDS, LENGTH, DIM, HEADS = 17, 8, 12, 3
PAD, BOS = 0, 1
SOURCE = torch.tensor([[5, 4, 3, 9, 2], [7, 8, 2, 0, 0], [11, 2, 0, 0, 0]])
TARGET = torch.tensor([[1, 6, 3, 12, 2], [1, 9, 2, 0, 0], [1, 5, 16, 2, 0]])


def model(score: str = "QKNorm2020-NoPE") -> Translator:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"source_vocab": WORDS, "dim": DIM, "heads": HEADS, "score": score}
    settings |= {"layers": 2, "decoder_layers": 2, "train_length": LENGTH, "norm": "layer"}
    settings["feed_forward"] = "gelu"
    return Translator(TranslatorConfig(**settings)).double()


def scales(made: Translator) -> dict[str, Tensor]:
    """g of every attention, by the path of its module."""
    found = {name: each for name, each in made.named_modules() if isinstance(each, Score)}
    return {name: each.scale for name, each in found.items() if each.scale is not None}


def heads(x: Tensor) -> Tensor:
    return torch.stack(torch.split(x, DIM // HEADS, -1), 1)


def paper(q: Tensor, k: Tensor, v: Tensor, g: Tensor, hidden: Tensor) -> Tensor:
    """The paper's attention, `hidden` (B, T, S) True where a query must not look."""
    q, k = (x / x.pow(2).sum(-1, keepdim=True).sqrt() for x in (heads(q), heads(k)))
    score = (g * (q @ k.transpose(-1, -2))).masked_fill(hidden[:, None], -math.inf)
    return torch.cat((score.softmax(-1) @ heads(v)).unbind(1), -1)


def norm(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = F.layer_norm(x, (DIM,), layer.gain, layer.bias, layer.eps)
    return y


def feed(place: Any, x: Tensor) -> Tensor:
    layer, y = place.sublayer, norm(place.norm, x)
    out: Tensor = x + F.gelu(y @ layer.up.weight.T) @ layer.down.weight.T
    return out


def itself(place: Any, x: Tensor, hidden: Tensor) -> Tensor:
    layer = place.sublayer
    q, k, v = (norm(place.norm, x) @ layer.qkv.weight.T).chunk(3, -1)
    out: Tensor = x + paper(q, k, v, layer.score.scale, hidden) @ layer.out.weight.T
    return out


def across(place: Any, x: Tensor, source: Tensor, hidden: Tensor) -> Tensor:
    layer = place.sublayer
    k, v = (source @ layer.kv.weight.T).chunk(2, -1)
    q = norm(place.norm, x) @ layer.q.weight.T
    out: Tensor = x + paper(q, k, v, layer.score.scale, hidden) @ layer.out.weight.T
    return out


def by_hand(made: Any, source: Tensor, target: Tensor) -> Tensor:
    """Logits of the whole PreLN encoder–decoder from its weights, with plain matmuls."""
    embedding = made.source_embedding.weight
    padded = (source == PAD)[:, None]
    x = embedding[source]
    for block in made.encoder:
        x = feed(block.feed_forward, itself(block.mixer, x, padded.expand(-1, x.shape[1], -1)))
    read = norm(made.encoder_norm, x)
    length = target.shape[1]
    future = torch.ones(length, length, dtype=torch.bool).triu(1).expand(len(target), -1, -1)
    y = embedding[target]
    for block in made.decoder:
        y = itself(block.mixer, y, future)
        y = feed(block.feed_forward, across(block.cross, y, read, padded.expand(-1, length, -1)))
    logits: Tensor = norm(made.decoder_norm, y) @ embedding.T
    return logits


def test_an_encoder_decoder_is_the_papers() -> None:
    made = model()
    found = scales(made)
    assert len(found) == 2 + 2 + 2
    with torch.no_grad():  # Apart, so that none can stand for another.
        for number, scale in enumerate(found.values()):
            scale.add_(0.7 * number - 2)
    ours, hand = made(SOURCE, TARGET), by_hand(made, SOURCE, TARGET)
    torch.testing.assert_close(ours, hand, rtol=0, atol=1e-10)
    wanted = list(made.parameters())
    real = TARGET[:, 1:] != PAD
    loss = made.loss(SOURCE, TARGET).loss
    expected = F.cross_entropy(hand[:, :-1][real], TARGET[:, 1:][real])
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    gradients = (torch.autograd.grad(x, wanted) for x in (loss, expected))
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("score", "length"),
    [("QKNorm2020-NoPE", LENGTH), ("QKNorm2020", LENGTH), ("QKNorm2020(length=29)-NoPE", 29)],
)
def test_every_g_starts_at_the_papers_number(score: str, length: int) -> None:
    found = scales(model(score))
    assert len(found) == 6
    for scale in found.values():
        assert scale.shape == ()
        assert scale.item() == pytest.approx(math.log2(length**2 - length), rel=1e-6)

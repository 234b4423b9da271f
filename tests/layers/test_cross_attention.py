"""Cross attention with every kind of score."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normattn.layers.attention import attention
from normattn.layers.cross_attention import CrossAttention
from normattn.layers.residual_scores import residual_layers
from score.cases import drawn, tensors

DIM, HEADS, L = 16, 4, 8
SCORES = [
    *("Baseline-NoPE", "Baseline-logn-NoPE", "QNA-NoPE", "KNA-logn-NoPE", "CosA-NoPE"),
    *("CosA-logn-NoPE", "QKRMSNorm-NoPE", "QLayerNorm-NoPE", "KInstanceNorm-NoPE"),
    *("QKInstanceNorm-NoPE", "QKNorm2020-NoPE", "Baseline-NoPE-SoftCap(cap=2)", "KNA-NoPE-Sink"),
]
PLACED = ["Baseline", "KNA-logn", "Baseline-XPos", "CosA-YaRN(factor=4)", "Baseline-ALiBi"]
PLACED += ["Baseline-NoPE-Chunked(size=4)"]


def _layer(score: str, kv_heads: int = 2) -> CrossAttention:
    torch.manual_seed(0)
    spec = score if "@" in score else f"{score}@{L}"
    layer = CrossAttention(DIM, HEADS, kv_heads, spec).double()
    drawn(layer.score)
    return layer


def _padding(lengths: list[int]) -> Tensor:
    return torch.arange(max(lengths))[None] >= torch.tensor(lengths)[:, None]


def _heads(layer: CrossAttention, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q = layer.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    k, v = layer.kv(source).unflatten(-1, (4, -1)).transpose(1, 2).chunk(2, 1)
    return q, k, v


@pytest.mark.parametrize("score", SCORES + PLACED)
def test_it_is_attention_of_both_sequences(score: str) -> None:
    """With each kind of score: what `attention`, tried against the definition, makes of q, k, v."""
    layer = _layer(score)
    x, source = tensors((2, 3, DIM), (2, 6, DIM))
    padding = _padding([6, 4])
    query_padding = torch.tensor([[False, False, True], [False] * 3])
    here, there = torch.tensor([4, 5, 9]), torch.arange(6)
    q, k, v = _heads(layer, x, source)
    given: dict[str, Any] = {"key_padding": padding, "query_padding": query_padding}
    given |= {"q_positions": here, "k_positions": there} if score in PLACED else {}
    o = attention(q, k, v, layer.score, False, backend="reference", **given)
    expected = layer.out(o.transpose(1, 2).flatten(2))
    memory = layer.remember(source, padding, there)
    ours = layer(x, memory, positions=here, query_padding=query_padding)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-7)
    (weights,) = tensors(tuple(ours.shape), seed=1)
    inputs = [x, source, *layer.parameters()]
    grads = (torch.autograd.grad(out, inputs, weights) for out in (ours, expected))
    torch.testing.assert_close(*grads, rtol=0, atol=1e-6)


@pytest.mark.parametrize("score", ["KNA-logn-NoPE", "Baseline"])
def test_sources_are_chosen_and_one_row_of_positions_serves_all(score: str) -> None:
    """Also where several rows read one source."""
    layer, rows, padding = _layer(score), torch.tensor([2, 0]), _padding([5, 3, 4])
    x, source = tensors((6, 4, DIM), (3, 5, DIM))
    here, there = torch.arange(4) + 3, torch.arange(5)
    memory = layer.remember(source, padding, there)
    chosen = layer.remember(source[rows], padding[rows], there)
    for alike in (there[None], there.expand(3, -1)):
        again = layer.remember(source, padding, alike)
        for one, other, read in ((again, memory, x), (again.choose(rows), chosen, x[:4])):
            ours = layer(read, one, positions=here[None])
            expected = layer(read, other, positions=here)
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mean", [False, True])
def test_residual_scores_are_summed(mean: bool) -> None:
    score = "Baseline-NoPE-RealFormer" + ("(running_mean=true)" if mean else "")
    layers, lengths = [_layer(score), _layer(score)], [5, 3]
    nn.init.normal_(layers[1].q.weight)
    x, source = tensors((4, 2, DIM), (2, 5, DIM))
    residual, padding = residual_layers(layers[0].score.spec, 2), _padding(lengths)
    total = torch.zeros(())
    assert residual is not None
    for number, layer in enumerate(layers, 1):
        ours = layer(x, layer.remember(source, padding), residual=residual[number - 1])
        q, *kv = _heads(layer, x, source)
        k, v = (part.repeat_interleave(2, 0).repeat_interleave(2, 1) for part in kv)
        total = total + q @ k.mT / math.sqrt(layer.head_dim)
        hidden = padding.repeat_interleave(2, 0)[:, None, None]
        seen = (total / (number if mean else 1)).masked_fill(hidden, -math.inf)
        hand = layer.out((seen.softmax(-1) @ v).transpose(1, 2).flatten(2))
        torch.testing.assert_close(ours, hand, rtol=0, atol=1e-7)
    (weights,) = tensors(tuple(hand.shape), seed=1)
    inputs = [x, source, *layers[0].q.parameters(), *layers[1].kv.parameters()]
    grads = (torch.autograd.grad(out, inputs, weights) for out in (ours, hand))
    torch.testing.assert_close(*grads, rtol=0, atol=1e-6)

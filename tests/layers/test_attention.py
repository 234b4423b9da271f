"""Attention against plain matmuls, and what it must refuse."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from layers.written_out import rotate
from normattn.layers.attention import Attention

DIM, HEADS, LENGTH = 16, 4, 7


def _input(batch: int = 2, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(batch, length, DIM, generator=generator, dtype=torch.float64)


def _oracle(layer: Attention, x: Tensor, normalise_keys: bool, causal: bool = True) -> Tensor:
    """Head by head, with one matmul per projection."""
    size, outs = layer.head_dim, []
    key_rows = layer.heads * size
    value_rows = key_rows + layer.kv_heads * size
    for head in range(layer.heads):
        shared = head // (layer.heads // layer.kv_heads)
        weight = layer.qkv.weight
        q = rotate(x @ weight[head * size : (head + 1) * size].T)
        k = x @ weight[key_rows + shared * size : key_rows + (shared + 1) * size].T
        v = x @ weight[value_rows + shared * size : value_rows + (shared + 1) * size].T
        k = rotate(F.normalize(k, dim=-1) if normalise_keys else k)
        s = q @ k.transpose(1, 2) / (1 if normalise_keys else math.sqrt(size))
        if causal:
            s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -math.inf)
        outs.append(s.softmax(-1) @ v)
    return torch.cat(outs, -1) @ layer.out.weight.T


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("score", ["Baseline", "KNA"])
def test_attention_is_plain_matmuls(score: str, kv_heads: int, causal: bool) -> None:
    torch.manual_seed(0)
    layer = Attention(DIM, HEADS, kv_heads, score).double()
    x = _input()
    expected = _oracle(layer, x, score == "KNA", causal)
    torch.testing.assert_close(layer(x, causal=causal), expected, rtol=0, atol=1e-7)


def test_attention_weights_drop_only_in_training() -> None:
    torch.manual_seed(0)
    layer = Attention(DIM, HEADS, dropout=0.5).double()
    x = _input()
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))

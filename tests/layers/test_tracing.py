"""What is made while tensors hold no numbers stays with the trace; real calls get real tables."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from layers.written_out import read_on
from normattn import Score, attention

# No other test has tables of these sizes, which the first call of each leaves behind.
HEADS, SIZE = 3, 22
SCORES = (
    *("KNA-logn@8", "Baseline-ALiBi", "QKRMSNorm-ReRoPE(window=3)@8", "Baseline-XPos"),
    *("CosA-logn-YaRN(factor=2)@64", "Baseline-SlidingWindow(window=3)", "Baseline-T5Bias"),
)


def _tensors(tokens: int) -> list[Tensor]:
    return list(torch.randn(3, 2, HEADS, tokens, SIZE))


def _fake(score: Score, tokens: int) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = _tensors(tokens)
        assert attention(q, k, v, score).shape == v.shape
        with torch.no_grad():
            read_on(score, (q, k, v), range(4))


def _real_beside_fake(score: Score, tokens: int) -> None:
    q, k, v = _tensors(tokens)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert attention(q, k, v, score).shape == v.shape


def _differentiated(score: Score, tokens: int) -> None:
    q, k, v = _tensors(tokens)
    torch.func.grad(lambda q: attention(q, k, v, score).sum())(q)


@pytest.mark.parametrize(
    ("name", "trace", "tokens"),
    [
        *((name, _fake, 19) for name in SCORES),
        *((name, _real_beside_fake, 70) for name in SCORES[:3]),
        *((name, _differentiated, 130) for name in SCORES[:3]),
    ],
)
def test_real_tensors_meet_nothing_of_a_trace(
    name: str, trace: Callable[[Score, int], None], tokens: int
) -> None:
    score = Score(name, HEADS, SIZE)
    trace(score, tokens)
    q, k, v = _tensors(tokens)
    at = torch.arange(tokens)
    # Given positions have tables of their own.
    expected = attention(q, k, v, score, q_positions=at, k_positions=at)
    out = attention(q, k, v, score)
    with torch.no_grad():
        steps = read_on(score, (q, k, v), range(4))
    for found in (out, steps):
        assert type(found) is Tensor
        wanted = expected[:, :, : found.shape[2]]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_an_export_leaves_nothing_behind() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = Score("KNA-logn@8", HEADS, SIZE)

        def forward(self, x: Tensor) -> Tensor:
            return attention(x, x, x, self.score)

    layer, x = Layer(), torch.randn(1, HEADS, 30, SIZE)
    exported = torch.export.export(layer, (x,), strict=False)
    torch.testing.assert_close(exported.module()(x), layer(x), rtol=1e-4, atol=1e-5)

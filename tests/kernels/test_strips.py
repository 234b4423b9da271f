"""The definition by strips of rows: memory, dropout, a bias of both positions."""

from __future__ import annotations

import pytest
import torch

from kernels.memory import largest
from normattn import Score, attention
from normattn.kernels import reference, tiled
from score.cases import tensors

B, H, G, T, D = 2, 4, 2, 96, 8
SHAPES = (B, H, T, D), (B, G, T, D), (B, G, T, D)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "STRIP_BYTES", 8 * T * (B * H + 36) * 4)
    monkeypatch.setattr(tiled, "ROWS", 16)


def _score(text: str = "Baseline-FIRE@32") -> Score:
    torch.manual_seed(0)
    return Score(text, H, D, G).double()


@pytest.mark.parametrize(
    ("text", "tokens", "columns"),
    [
        ("Baseline-FIRE@32", T, T),
        ("Baseline-CoPE(positions=6)", T, T),
        ("KNA-DualChunk(size=192,local=8)", 512, 192),
    ],
)
def test_no_tensor_holds_every_pair(text: str, tokens: int, columns: int) -> None:
    """Neither a forward nor a backward; the reference shows that one would be noticed."""
    q, k, v = tensors((B, H, tokens, D), (B, G, tokens, D), (B, G, tokens, D))
    score = _score(text)
    for backend in ("auto", "reference"):
        with largest() as seen:
            out = attention(q, k, v, score, backend=backend)
            torch.autograd.grad(out.sum(), [q, k, v, *score.parameters()])
        few = seen.numel < B * H * columns * tokens // 4
        assert few == (backend == "auto"), backend


def test_what_is_dropped_in_the_forward_is_dropped_in_the_backward() -> None:
    """The output is linear in v: its gradient times v gives the output again."""
    q, k, v = tensors(*SHAPES)
    out = attention(q, k, v, _score(), dropout_p=0.4)
    weights = torch.randn_like(out)
    (by_v,) = torch.autograd.grad(out, v, weights)
    torch.testing.assert_close((by_v * v).sum(), (out * weights).sum())
    assert not torch.allclose(out, attention(q, k, v, _score()))

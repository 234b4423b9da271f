"""The definition by strips of rows: memory, dropout, a bias of both positions, half precision."""

from __future__ import annotations

import pytest
import torch

from kernels.memory import largest
from normattn import Score, attention, explain
from normattn.kernels import reference
from normattn.layers.cache import KeyValueCache
from score.cases import tensors

B, H, G, T, D = 2, 4, 2, 96, 8
SHAPES = (B, H, T, D), (B, G, T, D), (B, G, T, D)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "STRIP_BYTES", 8 * T * (B * H + 36) * 4)


def _score() -> Score:
    torch.manual_seed(0)
    return Score("Baseline-FIRE@32", H, D, G).double()


def test_no_tensor_holds_every_pair(small: None) -> None:
    """Neither a forward nor a backward; the reference shows that one would be noticed."""
    q, k, v = tensors(*SHAPES)
    score = _score()
    for backend in ("auto", "reference"):
        with largest() as seen:
            out = attention(q, k, v, score, backend=backend)
            torch.autograd.grad(out.sum(), [q, k, v, *score.parameters()])
        assert (seen.numel < B * H * T * T // 4) == (backend == "auto"), backend


def test_what_is_dropped_in_the_forward_is_dropped_in_the_backward(small: None) -> None:
    """The output is linear in v: its gradient times v gives the output again."""
    q, k, v = tensors(*SHAPES)
    out = attention(q, k, v, _score(), dropout_p=0.4)
    weights = torch.randn_like(out)
    (by_v,) = torch.autograd.grad(out, v, weights)
    torch.testing.assert_close((by_v * v).sum(), (out * weights).sum())
    assert not torch.allclose(out, attention(q, k, v, _score()))


@torch.no_grad()
def test_a_cache_past_the_threshold(small: None) -> None:
    q, k, v = tensors(*SHAPES)
    score, cache, pieces, first = _score(), KeyValueCache(), [], 0
    for size in (1, 30, 1, 1, 50, 13):
        new = slice(first, first + size)
        pieces.append(attention(q[:, :, new], k[:, :, new], v[:, :, new], score, cache=cache))
        first += size
    torch.testing.assert_close(torch.cat(pieces, 2), attention(q, k, v, score))


def test_the_bias_of_fire_depends_on_the_share_alone() -> None:
    """Past the threshold ψ(i − j)/ψ(i) decides; before it the distance does, whatever i is."""
    score = _score()
    q = torch.zeros(1, H, T, D, dtype=torch.float64)
    k, v = q[:, :G], torch.eye(T, dtype=torch.float64).expand(1, G, T, T)
    weights = attention(q, k, v, score)[0].log()
    first = weights[:, 3, 3] - weights[:, 3, 1]
    torch.testing.assert_close(weights[:, 7, 7] - weights[:, 7, 5], first)
    assert not torch.allclose(weights[:, 90, 90] - weights[:, 90, 88], first)


def test_explain_says_why() -> None:
    told = explain("Baseline-FIRE@512", (1, 8, 4096, 64))
    assert told.kernel == "strips"
    assert told.working_bytes < 2**24
    assert "a bias of both positions" in told.refused["chunked"]

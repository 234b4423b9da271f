"""Chunked linear + cross-entropy + accuracy against `F.cross_entropy` on the whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from normattn import InputError
from normattn.kernels import cross_entropy, linear_cross_entropy, token_scores
from score.cases import tensors

from .memory import largest

N, D, V = 11, 6, 17
four = pytest.mark.parametrize("chunk", [4], indirect=True)
TARGETS = torch.tensor([0, 16, 3, 3, 8, 1, 2, 0, 16, 5, 9])


@pytest.fixture(params=[1, 4, 11, 512])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a chunk."""
    monkeypatch.setattr(cross_entropy, "CHUNK", request.param)


def _assert_close(ours: Any, expected: Any) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_loss_hits_and_gradients(chunk: None, smoothing: float) -> None:
    """With gradients and without, the mean and token by token."""
    both = hidden, weight = tensors((N, D), (V, D))
    result = linear_cross_entropy(hidden, weight, TARGETS, label_smoothing=smoothing)
    with torch.no_grad():
        without = linear_cross_entropy(hidden, weight, TARGETS, label_smoothing=smoothing)
    scores, logits = token_scores(hidden, weight, TARGETS), hidden @ weight.T
    expected = F.cross_entropy(logits, TARGETS, label_smoothing=smoothing)
    single = F.cross_entropy(logits, TARGETS, reduction="none").detach()
    _assert_close((result.loss, without.loss), (expected, expected.detach()))
    _assert_close((result.nll, without.nll, scores.loss), (single.mean(), single.mean(), single))
    assert not result.nll.requires_grad
    assert not scores.loss.requires_grad
    assert torch.equal(scores.correct, logits.argmax(-1) == TARGETS)
    assert result.correct == scores.correct.sum()
    losses = result.loss, expected
    _assert_close(*(torch.autograd.grad(loss * 3, both, retain_graph=True) for loss in losses))
    for one in both:  # The other is fixed.
        left, right = (x if x is one else x.detach() for x in both)
        alone = linear_cross_entropy(left, right, TARGETS, smoothing).loss
        _assert_close(*(torch.autograd.grad(x, one, retain_graph=True) for x in (alone, expected)))


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_label_smoothing_that_is_no_share_is_refused(share: float) -> None:
    hidden, weight = tensors((N, D), (V, D))
    with pytest.raises(InputError, match=r"label_smoothing is .*from 0 to 1"):
        linear_cross_entropy(hidden, weight, TARGETS, label_smoothing=share)


@four
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_retained_graph_gives_the_same_gradients_again(chunk: None, dtype: torch.dtype) -> None:
    """The first backward scales and hands out what the forward made; later ones make it anew."""
    hidden, weight = tensors((N, D), (V, D), dtype=dtype)
    loss = linear_cross_entropy(hidden, weight, TARGETS).loss
    first = torch.autograd.grad(loss * 3, (hidden, weight), retain_graph=True)
    kept = [x.clone() for x in first]
    second = torch.autograd.grad(loss * 3, (hidden, weight), retain_graph=True)
    third = torch.autograd.grad(loss * 6, (hidden, weight))
    for one, copy, two, three in zip(first, kept, second, third, strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, copy)
        assert torch.equal(one, two)
        assert torch.equal(one * 2, three)


def test_sums_beyond_float16_have_a_mean_within() -> None:
    """8,192 hidden states of 10: the gradient of a word is −9, the sum over tokens −77,000."""
    hidden = torch.full((8192, 4), 10.0)
    weight, targets = torch.zeros(32, 4), torch.zeros(8192, dtype=torch.int64)
    grads = []
    for dtype in (torch.float16, torch.float32):
        leaf = weight.to(dtype).requires_grad_()
        loss = linear_cross_entropy(hidden.to(dtype), leaf, targets).loss
        (grad,) = torch.autograd.grad(loss, leaf)
        assert grad.dtype == dtype
        grads.append(grad.float())
    torch.testing.assert_close(*grads, rtol=1e-2, atol=1e-2)


def test_of_equal_logits_the_first_is_the_answer(chunk: None) -> None:
    hidden, weight = torch.ones(6, D), torch.ones(V, D)
    weight[0] = 0
    targets = torch.tensor([0, 1, 2, 16, 1, 5])
    expected = torch.tensor([False, True, False, False, True, False])
    assert torch.equal(token_scores(hidden, weight, targets).correct, expected)
    assert linear_cross_entropy(hidden, weight.requires_grad_(), targets).correct == 2


@pytest.mark.parametrize("part", [1, 32 * 10, 2**20])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_autocast_to_bfloat16(part: int, smoothing: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "PART", part)
    monkeypatch.setattr(cross_entropy, "CHUNK", 64)
    hidden, weight = tensors((200, 32), (64, 32), dtype=torch.float32)
    targets = torch.arange(200) % 64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = linear_cross_entropy(hidden, weight, targets, smoothing)
    assert result.loss.dtype == torch.float32
    logits = hidden.double() @ weight.double().T
    exact = F.cross_entropy(logits, targets, label_smoothing=smoothing)
    assert abs(result.loss.item() - exact.item()) < 0.01 * exact.item()
    ours = torch.autograd.grad(result.loss, (hidden, weight))
    for mine, hand in zip(ours, torch.autograd.grad(exact, (hidden, weight)), strict=True):
        assert mine.dtype == torch.float32
        assert (mine - hand).norm() < 0.02 * hand.norm()


@four
def test_logits_beyond_the_range_of_exp(chunk: None) -> None:
    hidden, weight = tensors((N, D), (V, D), dtype=torch.float32)
    result = linear_cross_entropy(hidden * 100, weight, TARGETS)
    torch.testing.assert_close(result.loss, F.cross_entropy(hidden * 100 @ weight.T, TARGETS))
    assert all(g.isfinite().all() for g in torch.autograd.grad(result.loss, (hidden, weight)))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_whole_logits_never_exist(
    autocast: bool, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK", 32)
    hidden, weight = tensors((512, 8), (64, 8), dtype=torch.float32)
    targets = torch.arange(512) % 64
    with largest() as record, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = linear_cross_entropy(hidden, weight, targets, smoothing).loss
        torch.autograd.grad(loss, (hidden, weight))
        token_scores(hidden, weight, targets)
    assert record.numel == 512 * 8  # the gradient of hidden, twice a chunk of 32 × 64


def test_a_second_derivative_is_refused() -> None:
    hidden, weight = tensors((N, D), (V, D))
    loss = linear_cross_entropy(hidden, weight, TARGETS).loss
    with pytest.raises(InputError, match="second derivatives"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_no_tokens_have_no_scores() -> None:
    scores = token_scores(torch.zeros(0, D), torch.zeros(V, D), torch.zeros(0, dtype=torch.int64))
    assert scores.loss.shape == scores.correct.shape == (0,)

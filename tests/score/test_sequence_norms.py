"""BatchNorm and InstanceNorm over tokens, against torch's own modules; padding does not count."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from normattn import InputError, Score, attention
from normattn.score.norms import BatchScoreNorm, InstanceScoreNorm

from .cases import tensors

B, H, T, D = 3, 2, 6, 4
PADDING = torch.arange(T)[None] < torch.tensor([[2], [0], [4]])


def flat(x: Tensor, padding: Tensor | None = None) -> Tensor:
    """The tokens that count, as rows of the H·D features that torch's BatchNorm1d takes."""
    rows = x.transpose(1, 2).flatten(2)
    return rows.flatten(0, 1) if padding is None else rows[~padding]


@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
def test_batch_norm_and_its_running_statistics(padding: Tensor | None) -> None:
    ours = BatchScoreNorm(H, D, 1e-5, gain=True).double()
    theirs = nn.BatchNorm1d(H * D, eps=1e-5, momentum=0.1).double()
    assert ours.weight is not None
    assert ours.bias is not None
    with torch.no_grad():
        for mine, other in ((ours.weight, theirs.weight), (ours.bias, theirs.bias)):
            mine.uniform_(0.5, 2)
            other.copy_(mine.flatten())
    for step in range(3):
        (x,) = tensors((B, H, T, D), seed=step)
        expected = theirs(flat(x * 3 + 1, padding))
        y = flat(ours(x * 3 + 1, padding), padding)
        torch.testing.assert_close(y, expected)
        (grad,) = torch.autograd.grad(y.square().mul(expected.detach()).sum(), x)
        (hand,) = torch.autograd.grad(expected.square().mul(expected.detach()).sum(), x)
        torch.testing.assert_close(grad, hand)
        assert theirs.running_mean is not None
        assert theirs.running_var is not None
        torch.testing.assert_close(ours.running_mean.flatten(), theirs.running_mean)
        torch.testing.assert_close(ours.running_var.flatten(), theirs.running_var)
    (x,) = tensors((B, H, T, D), seed=9)
    torch.testing.assert_close(flat(ours.eval()(x)), theirs.eval()(flat(x)))
    before = ours.running_mean.clone()
    ours(x)
    assert torch.equal(ours.running_mean, before)


def test_instance_norm() -> None:
    ours = InstanceScoreNorm(H, D, 1e-5, gain=False)
    theirs = nn.InstanceNorm1d(H * D, eps=1e-5)
    (x,) = tensors((B, H, T, D))
    y = ours(x)
    expected = theirs(x.transpose(2, 3).flatten(1, 2)).reshape(B, H, D, T).transpose(2, 3)
    torch.testing.assert_close(y, expected)
    padded = ours(x, PADDING)
    for b in range(B):
        alone = ours(x[b : b + 1, :, ~PADDING[b]])
        torch.testing.assert_close(padded[b : b + 1, :, ~PADDING[b]], alone)


@pytest.mark.parametrize("text", ["QKBatchNorm", "QKInstanceNorm", "KBatchNorm"])
def test_what_stands_in_the_padding_changes_nothing(text: str) -> None:
    q, k, v = tensors((B, H, T, D), (B, H, T, D), (B, H, T, D))
    results = []
    for fill in (0.0, 1e3):
        hidden = PADDING[:, None, :, None]
        inputs = [torch.where(hidden, fill, x) for x in (q, k, v)]
        score = Score(text, H, D).double()
        out = attention(
            *(inputs[0], inputs[1], inputs[2], score, False, None),
            key_padding=PADDING,
            query_padding=PADDING,
        )
        buffers = torch.cat([buffer.flatten() for buffer in score.buffers()] or [v.new_zeros(1)])
        results.append((out.masked_fill(hidden, 0.0), buffers))
    for one, other in pairwise(results):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("text", ["QKBatchNorm", "QBatchNorm", "KInstanceNorm", "QKInstanceNorm"])
def test_statistics_over_tokens_are_refused_when_causal(text: str) -> None:
    q, k, v = tensors((B, H, T, D), (B, H, T, D), (B, H, T, D))
    score = Score(text, H, D).double()
    for module in (score, score.eval()):
        with pytest.raises(InputError, match=f"{text} takes statistics across the sequence"):
            attention(q, k, v, module)


def test_a_batch_norm_without_gain_still_needs_a_module() -> None:
    q, k, v = tensors((B, H, T, D), (B, H, T, D), (B, H, T, D))
    with pytest.raises(InputError, match="QKBatchNorm learns running statistics: make a Score"):
        attention(q, k, v, "QKBatchNorm(gain=false)", causal=False)
    with pytest.raises(InputError, match=r"QKRMSNorm learns query_norm.weight, key_norm.weight"):
        attention(q, k, v, "QKRMSNorm")
    with pytest.raises(InputError, match="QKNorm2020 learns scale: make a Score"):
        attention(q, k, v, "QKNorm2020@8")
    out = attention(q, k, v, "QKInstanceNorm(gain=false)", causal=False)
    assert out.isfinite().all()


def test_a_batch_of_one_token_does_not_blow_up() -> None:
    module = BatchScoreNorm(H, D, 1e-5, gain=False)
    (x,) = tensors((1, H, 1, D), dtype=torch.float32)
    assert (module(x) == 0).all()
    assert module.running_var.isfinite().all()

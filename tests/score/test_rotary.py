"""Rotation in both layouts, against transformers and against a third way of writing it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as interleaved_rotary
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as half_rotary

from normattn.score.parts import rope_frequencies
from normattn.score.rotary import Rotator

from .cases import tensors

D, T = 8, 11


def turn(x: Tensor, positions: Tensor, layout: str, scale: float | Tensor = 1.0) -> Tensor:
    theta = rope_frequencies(D, 10000.0)
    return Rotator(theta, layout == "interleaved").at(positions, x.dtype, scale)(x)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_the_rotation_of_transformers(layout: str) -> None:
    q, k = tensors((2, 3, T, D), (2, 1, T, D), dtype=torch.float32)
    where = torch.arange(T)
    angle = where[:, None] * rope_frequencies(D, 10000.0).float()
    if layout == "half":
        angle, theirs = torch.cat((angle, angle), -1), half_rotary
    else:
        angle, theirs = angle.repeat_interleave(2, -1), interleaved_rotary
    expected = theirs(q, k, angle.cos()[None], angle.sin()[None])
    for mine, other in zip((turn(q, where, layout), turn(k, where, layout)), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


def test_even_and_odd_parts_rotated_and_then_concatenated() -> None:
    """The third way of writing it permutes features, so it gives the interleaved scores."""
    q, k = tensors((1, 1, T, D), (1, 1, T, D))
    where = torch.arange(T)

    def third(x: Tensor) -> Tensor:
        angle = where[:, None] * rope_frequencies(D, 10000.0)
        even, odd = x[..., ::2], x[..., 1::2]
        turned = even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()
        return torch.cat(turned, -1)

    scores = third(q) @ third(k).mT
    interleaved = turn(q, where, "interleaved") @ turn(k, where, "interleaved").mT
    half = turn(q, where, "half") @ turn(k, where, "half").mT
    torch.testing.assert_close(scores, interleaved)
    assert (scores - half).abs().max() > 0.1


def test_one_layout_is_the_other_with_features_permuted() -> None:
    (x,) = tensors((1, 2, T, D))
    where = torch.arange(T)
    order = torch.arange(D).reshape(2, -1).T.flatten()
    torch.testing.assert_close(
        turn(x[..., order], where, "interleaved"), turn(x, where, "half")[..., order]
    )


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_a_scale_multiplies_the_result_and_each_row_its_own(layout: str) -> None:
    (x,) = tensors((2, 2, T, D))
    rows = torch.stack((torch.arange(T), torch.arange(T) * 7 + 3))
    scale = torch.linspace(0.5, 2, T, dtype=torch.float64)
    together = turn(x, rows, layout, scale)
    for b in (0, 1):
        alone = turn(x[b : b + 1], rows[b], layout) * scale[:, None]
        torch.testing.assert_close(together[b : b + 1], alone)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("strided", [False, True])
def test_any_memory_layout(layout: str, strided: bool) -> None:
    """Heads come out of a projection as a transposed view; one head as an expanded one."""
    (base,) = tensors((2, T, 3, D))
    x = base.transpose(1, 2) if strided else base[:, :, :1].transpose(1, 2).expand(-1, 3, -1, -1)
    where = torch.arange(T)
    assert not x.is_contiguous()
    expected = turn(x.contiguous(), where, layout)
    assert torch.equal(turn(x, where, layout), expected)
    (ours,) = torch.autograd.grad(turn(x, where, layout).sin().sum(), base)
    (hand,) = torch.autograd.grad(turn(x.contiguous(), where, layout).sin().sum(), base)
    torch.testing.assert_close(ours, hand)


def test_far_positions_keep_their_precision_in_float32() -> None:
    """Angles are made in float64: at position 2^20 a float32 angle would be off by 0.06."""
    (x,) = tensors((1, 1, 1, D))
    where = torch.tensor([2**20 + 1])
    exact = turn(x, where, "half")
    torch.testing.assert_close(turn(x.float(), where, "half"), exact.float(), rtol=1e-6, atol=1e-6)
    low = turn(x.bfloat16(), where, "half")
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.double(), exact, rtol=0.01, atol=0.02)

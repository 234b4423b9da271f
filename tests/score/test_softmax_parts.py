"""Normalisers beside softmax and CoPE: first values, order of keys, half precision, NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from normattn import Score, attention

from .cases import tensors

B, H, T, D, P = 2, 2, 11, 8, 6
SHAPES = (B, H, T, D), (B, 1, T, D), (B, 1, T, D)


def _cope(text: str = f"Baseline-CoPE(positions={P})") -> tuple[Score, Tensor]:
    """The score with random embeddings, and these."""
    score = Score(text, H, D, 1).double()
    assert score.bias is not None
    with torch.no_grad():
        score.bias["e"].copy_(tensors(tuple(score.bias["e"].shape), seed=1)[0])
    return score, score.bias["e"]


def test_embeddings_of_cope_start_at_nothing_and_learn() -> None:
    q, k, v = tensors(*SHAPES)
    score = Score("Baseline-CoPE", H, D, 1).double()
    out = attention(q, k, v, score)
    torch.testing.assert_close(out, attention(q, k, v, "Baseline-NoPE"))
    assert score.bias is not None
    (grad,) = torch.autograd.grad(out.square().sum(), score.bias["e"])
    assert grad.shape == (64, D)
    assert (grad[:5] != 0).all()
    assert (grad[T + 1 :] == 0).all()


@pytest.mark.parametrize("text", ["KNA-StickBreaking", f"Baseline-CoPE(positions={P})"])
def test_keys_in_any_order_are_counted_by_position(text: str) -> None:
    q, k, v = tensors(*SHAPES)
    score = _cope(text)[0] if "CoPE" in text else text
    order = torch.randperm(T, generator=torch.Generator().manual_seed(3))
    own = [x[:, :, order] for x in (q, k, v)]
    mixed = attention(own[0], own[1], own[2], score, q_positions=order, k_positions=order)
    torch.testing.assert_close(mixed, attention(q, k, v, score)[:, :, order])


def test_half_precision_counts_many_keys() -> None:
    """Hundreds of gates, or shares of a stick: summed in bfloat16 they would stand still."""
    q, k, v = (x.detach() for x in tensors((1, 1, 1000, 8), (1, 1, 1000, 8), (1, 1, 1000, 8)))
    score = Score("Baseline-CoPE(positions=700)", 1, 8)
    assert score.bias is not None
    with torch.no_grad():
        score.bias["e"].copy_((torch.arange(700) / 4).cos()[:, None].expand(-1, 8))
    for made, first, inputs in (
        (score, 500, (q, k, v)),
        ("Baseline-NoPE-StickBreaking", 0, (3 * q - 4, k.abs(), v)),
    ):
        low_q, low_k, low_v = (x.bfloat16() for x in inputs)
        half = attention(low_q, low_k, low_v, made)
        if isinstance(made, Score):
            # Counted by what autocast makes of the product, rows were off by 0.06.
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert torch.equal(attention(low_q, low_k, low_v, made), half)
            made = made.double()
        exact = attention(low_q.double(), low_k.double(), low_v.double(), made)
        assert half.dtype == torch.bfloat16
        assert (half.double() - exact)[:, :, first:].abs().max() < 0.03


def test_a_key_that_is_no_number_spoils_the_rows_that_see_it() -> None:
    q, k, v = (x.detach() for x in tensors(*SHAPES))
    k[:, :, 5] = torch.nan
    for backend in ("strips", "reference"):
        out = attention(q, k, v, _cope()[0], backend=backend)
        assert out[:, :, :5].isfinite().all()
        assert out[:, :, 5:].isnan().all()

"""NEZHA's score and its values: a double loop, every kernel, any positions and documents."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from normattn import InputError, Score, attention
from score.cases import tensors

B, H, G, T, S, D, E, CLIP = 2, 4, 2, 4, 7, 4, 5, 2
NAME = f"NEZHA(clip={CLIP})"


def _row(i: int, j: int, size: int) -> Tensor:
    """R of query i and key j as the authors' loop fills its table."""
    position = min(max(j - i, -CLIP), CLIP) + CLIP
    row = [0.0] * size
    for m in range(size // 2):
        row[2 * m] = math.sin(position / 10000 ** (2 * m / size))
        row[2 * m + 1] = math.cos(position / 10000 ** (2 * m / size))
    return torch.tensor(row, dtype=torch.float64)


@pytest.mark.parametrize("variant", ["Baseline", "KNA"])
@pytest.mark.parametrize("causal", [True, False])
def test_outputs_and_gradients_pair_by_pair(variant: str, causal: bool) -> None:
    leaves = q, k, v = tensors((B, H, T, D), (B, G, S, D), (B, G, S, E))
    unit = variant == "KNA"
    keys, scale = k / k.norm(dim=-1, keepdim=True) if unit else k, 1 if unit else D**-0.5
    keys, values = (x.repeat_interleave(H // G, 1) for x in (keys, v))
    rows = []
    for i in range(S - T, S):
        seen = range(i + 1 if causal else S)
        query = q[:, :, i - S + T]
        content = [((keys[:, :, j] + _row(i, j, D)) * query).sum(-1) for j in seen]
        weights = (scale * torch.stack(content, -1)).softmax(-1)
        read = torch.stack([values[:, :, j] + _row(i, j, E) for j in seen], -2)
        rows.append((weights[..., None] * read).sum(-2))
    expected = torch.stack(rows, -2)
    upstream = torch.linspace(-1, 1, expected.numel()).double().view_as(expected)
    by_hand = torch.autograd.grad(expected, leaves, upstream)
    for backend in ("auto", "reference", "strips"):
        out = attention(q, k, v, f"{variant}-{NAME}", causal, backend=backend)
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-11)
        for ours, hand in zip(torch.autograd.grad(out, leaves, upstream), by_hand, strict=True):
            torch.testing.assert_close(ours, hand, rtol=1e-9, atol=1e-10)
    for backend in ("fused", "chunked"):
        with pytest.raises(InputError, match="both positions"):
            attention(q, k, v, f"{variant}-{NAME}", causal, backend=backend)


def test_positions_may_stand_anywhere_and_documents_apart() -> None:
    q, k, v = (x.detach() for x in tensors((1, H, S, D), (1, G, S, D), (1, G, S, E)))
    score = Score(f"Baseline-{NAME}", H, D, G)
    whole, far = attention(q, k, v, score), torch.arange(S) + 100_000
    torch.testing.assert_close(attention(q, k, v, score, q_positions=far, k_positions=far), whole)
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    mixed = attention(
        *(q, k[:, :, order], v[:, :, order], score), q_positions=torch.arange(S), k_positions=order
    )
    torch.testing.assert_close(mixed, whole)
    numbers = torch.tensor([[0] * 3 + [1] * (S - 3)])
    packed = attention(q, k, v, f"Baseline-{NAME}-Packed", documents=numbers)
    alone = attention(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], score)
    torch.testing.assert_close(packed[:, :, 3:], alone)


def test_half_precision_rows_without_keys_and_the_log_sum_exp() -> None:
    q, k, v = (x.detach() for x in tensors((1, H, S, D), (1, G, S, D), (1, G, S, E)))
    hidden = torch.ones(1, 1, S, S, dtype=torch.bool)
    hidden[:, :, 3] = False
    score = Score(f"Baseline-{NAME}", H, D, G)
    exact, lse = attention(q, k, v, score, attn_mask=hidden, return_lse=True)
    assert not exact[:, :, 3].any()
    assert (lse[:, :, 3] == -math.inf).all()
    low = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), score, attn_mask=hidden)
    torch.testing.assert_close(low.double(), exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("beside", ["Differential", "XSA", "VORoPE", "NoPE"])
def test_what_stands_beside_it(beside: str) -> None:
    if beside == "NoPE":
        assert str(Score(f"Baseline-NoPE-{NAME}", H, D).spec) == f"Baseline-{NAME}"
        return
    with pytest.raises(InputError, match="cannot be combined"):
        Score(f"Baseline-{NAME}-{beside}", H, D)

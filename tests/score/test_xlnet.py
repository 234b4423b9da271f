"""XLNet's score: transformers' own layer, a double loop, every position and document."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from normattn import Score, ScoreSpec, attention
from score.cases import tensors

B, H, T, D = 2, 2, 7, 4


def _score(text: str = "Baseline-XLNet") -> Score:
    torch.manual_seed(0)
    score = Score(ScoreSpec.parse(text), H, D).double()
    with torch.no_grad():
        for parameter in score.parameters():
            parameter.mul_(30)
    return score


@pytest.mark.parametrize("causal", [True, False])
def test_it_is_the_score_of_transformers(causal: bool) -> None:
    xlnet = pytest.importorskip("transformers.models.xlnet.modeling_xlnet")
    from transformers import XLNetConfig

    kind = "uni" if causal else "bi"
    config = XLNetConfig(d_model=H * D, n_head=H, dropout=0.0, attn_type=kind, n_layer=0)
    theirs, model = xlnet.XLNetRelativeAttention(config).double().eval(), xlnet.XLNetModel(config)
    score, (q, k, v) = _score(), tensors(*[(B, H, T, D)] * 3)
    learned = dict(score.named_parameters())
    waves = model.relative_positional_encoding(T, T, bsz=B).double()
    with torch.no_grad():
        theirs.r_w_bias.copy_(learned["bias.u"])
        theirs.r_r_bias.copy_(learned["bias.v"])
    keys = torch.einsum("rbe,hde->rbhd", waves, learned["bias.w"].view(H, D, -1))
    hidden = torch.ones(T, T).triu(1).double()[..., None, None].expand(T, T, B, H)
    expected = theirs.rel_attn_core(
        *(x.permute(2, 0, 1, 3) for x in (q, k, v)), keys, attn_mask=hidden if causal else None
    ).permute(1, 2, 0, 3)
    # Their sinusoids are of float32.
    torch.testing.assert_close(attention(q, k, v, score, causal), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("text", ["Baseline-XLNet", "KNA-XLNet"])
@pytest.mark.parametrize("causal", [True, False])
def test_outputs_and_gradients_pair_by_pair(text: str, causal: bool) -> None:
    score, (q, k, v) = _score(text), tensors(*[(B, H, T, D)] * 3)
    learned = dict(score.named_parameters())
    unit = text.startswith("KNA")
    keys, scale = k / k.norm(dim=-1, keepdim=True) if unit else k, 1 if unit else D**-0.5
    rows: list[Tensor] = []
    for i in range(T):
        columns = []
        for j in range(T):
            angles = [(i - j) * 10000 ** (-2 * m / (H * D)) for m in range(H * D // 2)]
            waves = [*map(math.sin, angles), *map(math.cos, angles)]
            wave = torch.tensor(waves, dtype=torch.float64)
            place = (learned["bias.w"] @ wave).view(H, D)
            content = ((q[:, :, i] + learned["bias.u"]) * keys[:, :, j]).sum(-1)
            columns.append(scale * (content + ((q[:, :, i] + learned["bias.v"]) * place).sum(-1)))
        rows.append(torch.stack(columns, -1))
    logits = torch.stack(rows, -2)
    if causal:
        logits = logits.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -math.inf)
    expected, leaves = logits.softmax(-1) @ v, [q, k, v, *learned.values()]
    weights = torch.linspace(-1, 1, expected.numel()).double().view_as(expected)
    by_hand = torch.autograd.grad(expected, leaves, weights)
    for backend in ("auto", "reference", "strips"):
        out = attention(q, k, v, score, causal, backend=backend)
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
        for ours, hand in zip(torch.autograd.grad(out, leaves, weights), by_hand, strict=True):
            torch.testing.assert_close(ours, hand, rtol=1e-9, atol=1e-10)


def test_positions_may_stand_anywhere_and_documents_apart() -> None:
    q, k, v = tensors(*[(1, H, T, D)] * 3)
    score, packed = _score(), _score("Baseline-XLNet-Packed")
    whole = attention(q, k, v, score)
    far = torch.arange(T) + 100_000
    moved = attention(q, k, v, score, q_positions=far, k_positions=far)
    torch.testing.assert_close(moved, whole, rtol=1e-8, atol=1e-8)
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    rows, keys, values = torch.arange(T), k[:, :, order], v[:, :, order]
    mixed = attention(q, keys, values, score, q_positions=rows, k_positions=order)
    torch.testing.assert_close(mixed, whole)
    numbers = torch.tensor([[0] * 3 + [1] * (T - 3)])
    second = attention(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], score)
    out = attention(q, k, v, packed, documents=numbers)
    torch.testing.assert_close(out[:, :, 3:], second)

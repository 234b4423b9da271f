"""The output gate: against its formula, with a cache, in both layers, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from layers.written_out import assert_agree
from normattn import Attention, InputError, Score, attention
from score.cases import tensors

B, H, G, T, D, E = 2, 4, 2, 9, 6, 5


def _by_hand(o: Tensor, gate: Tensor, act: str = "sigmoid") -> Tensor:
    """σ(g) o or ln(1 + eᵍ) o, one head and token at a time."""
    out = torch.zeros_like(o)
    for b in range(o.shape[0]):
        for h in range(o.shape[1]):
            for t in range(o.shape[2]):
                wide = gate.shape[-1] // o.shape[1]
                mine = gate[b, t, h * wide : (h + 1) * wide]
                logistic = act == "sigmoid"
                size = 1 / (1 + (-mine).exp()) if logistic else (1 + mine.exp()).log()
                out[b, h, t] = o[b, h, t] * size
    return out


@pytest.mark.parametrize(("per", "wide"), [("head", H), ("feature", H * E)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("act", ["sigmoid", "softplus"])
def test_outputs_and_gradients(per: str, wide: int, causal: bool, act: str) -> None:
    leaves = tensors((B, H, T, D), (B, G, T, D), (B, G, T, E), (B, T, wide))
    q, k, v, gate = leaves
    ours = attention(q, k, v, f"KNA-Gate(per={per},act={act})", causal=causal, gate=gate)
    plain = attention(q, k, v, "KNA", causal=causal, backend="reference")
    assert_agree(ours, _by_hand(plain, gate, act), leaves)


@pytest.mark.parametrize("backend", ["auto", "reference", "chunked"])
def test_two_heads_of_a_key_head_make_one_output(backend: str) -> None:
    """o_p = softmax(s_2p)·v − σ(λ_p)·softmax(s_2p+1)·v, where both read one key head's values."""
    leaves = q, k, v, shares = tensors((B, H, T, D), (B, 1, T, D), (B, 1, T, E), (B, T, H // 2))
    score = Score("KNA-NoPE-DifferentialV2", H, D, 1)
    ours = attention(q, k, v, score, gate=shares, backend=backend)
    seen = torch.ones(T, T, dtype=torch.bool).tril()
    outputs = []
    for p in range(H // 2):
        one, other = (
            (q[:, head] @ (k / k.norm(dim=-1, keepdim=True))[:, 0].mT)
            .masked_fill(~seen, -torch.inf)
            .softmax(-1)
            @ v[:, 0]
            for head in (2 * p, 2 * p + 1)
        )
        outputs.append(one - other / (1 + (-shares[:, :, p, None]).exp()))
    assert_agree(ours, torch.stack(outputs, 1), leaves)


def test_a_layer_of_twice_the_query_heads_has_the_projections_of_the_authors() -> None:
    torch.manual_seed(0)
    layer = Attention(12, 4, 2, score="Baseline-DifferentialV2", head_dim=6)
    assert layer.out.weight.shape == (12, 2 * 6)
    assert layer.gate is not None
    assert layer.gate.weight.shape == (2, 12)
    out = layer(torch.randn(1, 5, 12))
    grads = torch.autograd.grad(out.square().sum(), list(layer.parameters()))
    assert all(grad.abs().sum() > 0 for grad in grads)
    with pytest.raises(InputError, match="even number of them, but it has 1"):
        Attention(12, 4, score="Baseline-DifferentialV2")
    with pytest.raises(InputError, match="cannot be combined"):
        Score("Baseline-Differential-DifferentialV2", 4, 6, 2)

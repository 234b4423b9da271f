"""The output gate: against its formula, with a cache, in both layers, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from normattn import attention
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
    expected = _by_hand(plain, gate, act)
    weights = torch.linspace(-1, 1, ours.numel(), dtype=ours.dtype).view_as(ours)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    for one, other in zip(
        torch.autograd.grad(ours, leaves, weights),
        torch.autograd.grad(expected, leaves, weights),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)

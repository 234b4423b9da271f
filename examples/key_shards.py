"""Attention over keys in two places, merged by the log-sum-exp of each part.

    o = Σ_p exp(ℓ_p − ℓ) · o_p        ℓ = ln Σ_p exp ℓ_p

Ring attention and split decoding divide the keys like this: each worker attends to its own, and
only outputs and log-sum-exps are exchanged. Gradients go through the merge.

Run it: `python examples/key_shards.py`.
"""

from __future__ import annotations

import torch

from normattn import Score, attention
from normattn.kernels import merge_by_lse

torch.manual_seed(0)
tokens, half = 64, 32
score = Score("KNA-YaRN(factor=4)@16", heads=4, head_dim=32)
q, k, v = (torch.randn(1, 4, tokens, 32, requires_grad=True) for _ in range(3))
whole, whole_lse = attention(q, k, v, score, return_lse=True)


def shard(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of all queries over some of the keys."""
    positions = torch.arange(tokens)
    return attention(
        *(q, k[:, :, keys], v[:, :, keys], score),
        q_positions=positions,
        k_positions=positions[keys],
        return_lse=True,
    )


out, lse = merge_by_lse(*shard(slice(0, half)), *shard(slice(half, tokens)))
torch.testing.assert_close(out, whole)
torch.testing.assert_close(lse, whole_lse)

merged = torch.autograd.grad(out.square().sum(), (q, k, v), retain_graph=True)
whole_gradients = torch.autograd.grad(whole.square().sum(), (q, k, v))
for gradient, expected in zip(merged, whole_gradients, strict=True):
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)
error = float((out - whole).abs().max().detach())
print(f"two shards of {half} keys give the attention over all {tokens}, to {error:.0e}")

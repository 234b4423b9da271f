"""How much attention a key receives, over what uniform attention would give it."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.lab.diagnostics.alpha import alpha
from normattn.lab.diagnostics.watching import Seen

_ROWS = 64


@torch.no_grad()
def received_attention(seen: Seen, horizon: int) -> Float[Tensor, "b h kept"]:
    """r_j = mean over i = j … j + horizon − 1 of α_ij · (i + 1), for the keys j ≤ S − horizon.

    Every key is looked at by the same number of queries at the same distances, so that neither its
    place nor the length of the text decides; 1 is what uniform attention gives. Computed in blocks
    of query rows: no (T, S) matrix is kept. Shapes: (B, H, S − horizon + 1). Raises `InputError`
    for a horizon that is not in 1 … S.
    """
    keys = seen.problem.k.shape[2]
    if not 1 <= horizon <= keys:
        raise InputError(f"a horizon must lie in 1 … {keys}, the number of keys, got {horizon}")
    kept = keys - horizon + 1
    batch, heads = seen.problem.q.shape[:2]
    total = torch.zeros(batch, heads, kept, dtype=torch.float64, device=seen.problem.q.device)
    for first in range(0, keys, _ROWS):
        query = torch.arange(first, min(first + _ROWS, keys), device=total.device)
        key = torch.arange(kept, device=total.device)
        behind = query[:, None] - key
        counted = (behind >= 0) & (behind < horizon)
        share = alpha(seen.problem, query)[..., :kept].double() * (query[:, None] + 1)
        total += (share * counted).sum(-2)
    return total / horizon

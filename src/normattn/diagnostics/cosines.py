"""The cosines between queries and the keys that they see: a histogram, never a matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normattn.diagnostics.watching import Seen

BINS = 200
"""Bins of equal width over −1 … 1."""

_ROWS = 64


@dataclass(frozen=True)
class CosineCounts:
    """Per text and head: how many pairs fall into each bin, and the extremes themselves."""

    counts: Int[Tensor, "b h bins"]
    least: Float[Tensor, "b h"]
    most: Float[Tensor, "b h"]


@torch.no_grad()
def count_cosines(seen: Seen) -> CosineCounts:
    """cos(P_i N(q_i), P_j N(k_j)) of every query with every key that it sees.

    Rotated and normalised as the score has them, so that the length of the text matters. Bin b
    holds −1 + 2b/200 ≤ cos < −1 + 2(b + 1)/200, the last one 1 too.
    """
    prepared, at = seen.prepared, seen.positions
    q = torch.nn.functional.normalize(prepared.q.double(), dim=-1)
    groups = q.shape[1] // prepared.k.shape[1]
    k = torch.nn.functional.normalize(prepared.k.double(), dim=-1).repeat_interleave(groups, 1)
    batch, heads, keys = k.shape[:3]
    counts = torch.zeros(batch, heads, BINS, dtype=torch.int64, device=q.device)
    least = torch.full((batch, heads), torch.inf, dtype=torch.float64, device=q.device)
    most = -least
    for first in range(0, keys, _ROWS):
        rows = slice(first, min(first + _ROWS, keys))
        cosine = (q[:, :, rows] @ k[:, :, : rows.stop].transpose(-1, -2)).clamp(-1.0, 1.0)
        behind = at.query[..., rows, None] - at.key[..., None, : rows.stop]
        hidden = behind < 0
        if prepared.window is not None:
            kept = at.key[..., None, : rows.stop] < prepared.kept
            hidden = hidden | ((behind >= prepared.window) & ~kept)
        counts += _histogram(cosine, hidden)
        least = torch.minimum(least, cosine.masked_fill(hidden, torch.inf).amin((-2, -1)))
        most = torch.maximum(most, cosine.masked_fill(hidden, -torch.inf).amax((-2, -1)))
    return CosineCounts(counts, least, most)


def _histogram(cosine: Tensor, hidden: Tensor) -> Tensor:
    """Counts (B, H, bins) of the entries that are not hidden."""
    batch, heads = cosine.shape[:2]
    place = ((cosine + 1.0) * (BINS / 2)).floor().long().clamp(0, BINS - 1)
    # One bin more, for what is hidden.
    place = place.masked_fill(hidden, BINS).flatten(2)
    row = torch.arange(batch * heads, device=cosine.device).view(batch, heads, 1)
    found = torch.bincount((place + row * (BINS + 1)).flatten(), minlength=row.numel() * (BINS + 1))
    return found.view(batch, heads, BINS + 1)[..., :BINS]

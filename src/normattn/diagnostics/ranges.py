"""Cosines outside their trained range, and the attention there, near and beyond the trained length.

Legend: B texts, H query heads, R rows of queries, S keys.
"""

from __future__ import annotations

import numpy as np
import polars as pl
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from normattn.diagnostics.alpha import alpha
from normattn.diagnostics.documents import Documents
from normattn.diagnostics.watching import Seen
from normattn.kernels.cosines import BINS

TAIL = 0.001
"""The share of the cosines at L left out at either end of their range."""

REGIONS = ("near inside", "near outside", "far inside", "far outside")
"""Pairs by i − j < L (trained) or ≥ L (never trained), and by their cosine's trained range."""

# Query rows whose pairs are held at once.
_ROWS = 64


def trained_range(counts: NDArray[np.float64]) -> NDArray[np.bool_]:
    """The bins of a head's range, (…, bins), from its cosines' histogram at L.

    Those that hold any of the cosines but for `TAIL` of them at either end.
    """
    shares = counts.cumsum(-1) / counts.sum(-1, keepdims=True)
    before = np.concatenate((np.zeros_like(shares[..., :1]), shares[..., :-1]), axis=-1)
    return np.asarray((shares > TAIL) & (before < 1 - TAIL))


@torch.no_grad()
def pairs_by_region(
    seen: Seen, inside: Bool[Tensor, "h bins"], length: int
) -> tuple[Float[Tensor, "b h 4"], Float[Tensor, "b h 4"]]:
    """Visible pairs and attention in each of the `REGIONS`.

    Of pairs their count; of attention Σ_i Σ_j α_ij over the queries at i ≥ L = `length` alone,
    which are those that can see a distance never trained. `inside` is each head's `trained_range`.
    Computed in blocks of query rows, cosines in float64: no (T, S) matrix is kept.
    """
    problem, visibility = seen.problem, seen.problem.visibility
    q, k = (normalize(x.double(), dim=-1) for x in (problem.q, problem.k))
    batch, heads, queries = q.shape[:3]
    k = k.repeat_interleave(heads // k.shape[1], 1)
    counts = torch.zeros(batch, heads, len(REGIONS), dtype=torch.float64, device=q.device)
    masses = torch.zeros_like(counts)
    head = torch.arange(heads, device=q.device)[:, None, None]
    every = slice(None)
    for first in range(0, queries, _ROWS):
        rows = slice(first, min(first + _ROWS, queries))
        bin_of = _bins(q[:, :, rows] @ k.transpose(-1, -2))
        region = 1 - inside[head, bin_of].long()
        region = region + 2 * (visibility.distance(rows, every) >= length)
        hidden = visibility.hidden(rows, every)
        seen_pairs = torch.ones_like(region, dtype=torch.float64)
        counts += _by_region(
            region, seen_pairs if hidden is None else seen_pairs.masked_fill(hidden, 0)
        )
        weights = alpha(problem, torch.arange(rows.start, rows.stop, device=q.device)).double()
        late = (visibility.query[..., rows] >= length).double()
        late = late[:, None, :, None] if late.dim() == 2 else late[:, None]
        masses += _by_region(region, weights * late)
    return counts, masses


def _bins(cosine: Tensor) -> Int[Tensor, "b h r s"]:
    """As `kernels.cosines` counts them."""
    return ((cosine.clamp(-1, 1) + 1) * (BINS / 2)).floor().long().clamp(0, BINS - 1)


def _by_region(region: Tensor, values: Tensor) -> Float[Tensor, "b h 4"]:
    return torch.stack([(values * (region == n)).sum((-2, -1)) for n in range(len(REGIONS))], -1)


class RangeCounts:
    """Pairs and attention at the longer length in each of the `REGIONS`, by document and head.

    Rows, by the number of the region: `pairs`, of all pairs that are seen; `attention`, Σ α over
    the queries at i ≥ L, of those queries. What the attention lacks to 1 a learned sink has.
    """

    def __init__(self, documents: Documents, near: NDArray[np.int64], length: int) -> None:
        """`near` are the cosines' histograms at L, (documents, layers, heads, bins)."""
        self.documents, self.length = documents, length
        self.inside = torch.from_numpy(trained_range(near.sum(0).astype(np.float64)))
        heads = near.shape[2]
        self.pairs = documents.room(heads, len(REGIONS))
        self.attention, self.queries = self.pairs.copy(), documents.room(heads, 1)

    def add(self, part: slice, seen: Seen) -> None:
        """Add what a layer has in a part of the texts."""
        inside = self.inside[seen.layer].to(seen.problem.q.device)
        pairs, attention = pairs_by_region(seen, inside, self.length)
        late = (seen.problem.visibility.query >= self.length).sum(-1)
        self.documents.add(self.pairs, part, seen.layer, pairs)
        self.documents.add(self.attention, part, seen.layer, attention)
        counted = late.expand(pairs.shape[0])[:, None, None].expand(*pairs.shape[:2], 1)
        self.documents.add(self.queries, part, seen.layer, counted)

    def measured(self) -> list[pl.DataFrame]:
        """The rows of the frame, without an identity."""
        whole = self.pairs.sum(-1, keepdims=True)
        named = {"axis": "region", "edges": list(range(len(REGIONS)))}
        return [
            self.documents.rows("pairs", self.pairs, whole, **named),
            self.documents.rows("attention", self.attention, self.queries, **named),
        ]

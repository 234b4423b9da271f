"""The cosines between queries and the keys that they see: a histogram, never a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import polars as pl
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from normattn.kernels import AttentionInputs
from normattn.kernels.cosines import BINS, CosineCounts, cosine_counts
from normattn.lab.diagnostics.sums import by_head
from normattn.lab.diagnostics.watching import Seen

EDGES = torch.linspace(-1, 1, BINS + 1, dtype=torch.float64).tolist()
"""Of the histogram's bins."""


@torch.no_grad()
def count_cosines(seen: Seen) -> CosineCounts:
    """cos(P_i N(q_i), P_j N(k_j)) of every query with every key that it sees.

    Rotated and normalised as the score has them, so that the length of the text matters; counted
    in float64, as `kernels.cosines` says.
    """
    p = seen.problem
    counted = cosine_counts(replace(p, q=p.q.double(), k=p.k.double()))
    return CosineCounts(counted.counts[:, :, 0], counted.least[:, :, 0], counted.most[:, :, 0])


class CosineSums:
    """One layer's cosines over several texts, by the bin of the query's position."""

    def __init__(self, heads: int, bins: int = 1) -> None:
        self.counts = torch.zeros(heads, bins, BINS, dtype=torch.int64)
        self.least = torch.full((heads, bins), torch.inf, dtype=torch.float64)
        self.most = -self.least

    def add(
        self,
        problem: AttentionInputs,
        valid: Bool[Tensor, "b h t"],
        bin_of: Int[Tensor, "b h t"] | None = None,
    ) -> None:
        """Add the visible pairs of those queries that are valid."""
        counted = cosine_counts(problem, valid, bin_of, self.counts.shape[1])
        self.counts += counted.counts.sum(0).cpu()
        self.least = self.least.minimum(counted.least.amin(0).double().cpu())
        self.most = self.most.maximum(counted.most.amax(0).double().cpu())

    def measured(self, edges: Sequence[int], layer: int) -> list[pl.DataFrame]:
        """The histograms as rows `cosine`, each with the factor `position` of its queries' bin.

        The extremes themselves are `least_cosine` and `largest_cosine` by position.
        """
        parts = [
            by_head("cosine", counts, counts, layer, "cosine", EDGES).with_columns(
                pl.lit(float(first)).alias("factor.position")
            )
            for first, counts in zip(edges, self.counts.double().unbind(1), strict=False)
        ]
        for name, ends in (("least_cosine", self.least), ("largest_cosine", self.most)):
            parts.append(by_head(name, ends, ends.isfinite().double(), layer, "position", edges))
        return parts

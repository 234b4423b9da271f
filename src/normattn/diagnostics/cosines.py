"""The cosines between queries and the keys that they see: a histogram, never a matrix."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from normattn.diagnostics.watching import Seen
from normattn.kernels import Problem, Visibility
from normattn.kernels.cosines import BINS, CosineCounts, cosine_counts

SHARES = (0.05, 0.5, 0.95)
"""The quantiles of a summary."""


@torch.no_grad()
def count_cosines(seen: Seen) -> CosineCounts:
    """cos(P_i N(q_i), P_j N(k_j)) of every query with every key that it sees.

    Rotated and normalised as the score has them, so that the length of the text matters; counted
    in float64, as `kernels.cosines` says.
    """
    prepared, at = seen.prepared, seen.positions
    window, kept = prepared.window, prepared.kept
    visible = Visibility(True, at.query, at.key, at.regular, window=window, kept=kept)
    q, k = prepared.q.double(), prepared.k.double()
    found = cosine_counts(Problem(q, k, k, visible))
    return CosineCounts(found.counts[:, :, 0], found.least[:, :, 0], found.most[:, :, 0])


class CosineSums:
    """One layer's cosines over several texts, by the bin of the query's position."""

    def __init__(self, heads: int, bins: int = 1) -> None:
        self.counts = torch.zeros(heads, bins, BINS, dtype=torch.int64)
        self.least = torch.full((heads, bins), torch.inf, dtype=torch.float64)
        self.most = -self.least

    def add(
        self,
        problem: Problem,
        valid: Bool[Tensor, "b h t"],
        bin_of: Int[Tensor, "b h t"] | None = None,
    ) -> None:
        """Add the visible pairs of those queries that are valid."""
        found = cosine_counts(problem, valid, bin_of, self.counts.shape[1])
        self.counts += found.counts.sum(0).cpu()
        self.least = self.least.minimum(found.least.amin(0).double().cpu())
        self.most = self.most.maximum(found.most.amax(0).double().cpu())

    def summary(self) -> list[list[float | None]]:
        """Per head the least cosine, the 5th, 50th and 95th percentile, the largest.

        Percentiles are linear within a bin of cosines, and so within 0.01 of the pairs' own.
        """
        ends = self.least.amin(-1), self.most.amax(-1)
        return [_range(*each) for each in zip(self.counts.sum(1), *ends, strict=True)]

    def by_position(self) -> list[list[list[float | None]]]:
        """The same per head and bin of the query's position."""
        return [
            [_range(*each) for each in zip(*head, strict=True)]
            for head in zip(self.counts, self.least, self.most, strict=True)
        ]


def _range(counts: Tensor, least: Tensor, most: Tensor) -> list[float | None]:
    """Extremes and quantiles; None where no pair was."""
    if not int(counts.sum()):
        return [None] * (2 + len(SHARES))
    return [float(least), *quantiles(counts, SHARES), float(most)]


def quantiles(counts: Tensor, shares: tuple[float, ...]) -> list[float]:
    """Quantiles of a histogram over −1 … 1, linear within the bin that holds them."""
    upto = counts.double().cumsum(0)
    found = []
    for share in shares:
        wanted = share * float(upto[-1])
        at = int(torch.searchsorted(upto, wanted).clamp(max=BINS - 1))
        below = float(upto[at] - counts[at])
        found.append(-1 + 2 * (at + (wanted - below) / float(counts[at])) / BINS)
    return found

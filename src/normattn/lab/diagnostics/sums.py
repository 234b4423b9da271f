"""What one layer's softmax did, summed by head and bin of the query's position.

Legend: B batch, H query heads, T queries, F fields, P position bins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import polars as pl
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normattn.kernels.stats import Observation
from normattn.lab.stats import sums

ROWS = ("entropy", "lse", "first_mass", "sink_mass")
MEANS = ("beyond", "angle")
TEXTS = "all texts"
"""The one unit of these sums."""


class LayerSums:
    """Sums over queries, on the device of the model until they are asked for."""

    def __init__(self, heads: int, bins: int, device: torch.device) -> None:
        """Zeros."""
        self.bins = bins
        self.heads = heads
        names = [*ROWS, *(f"{name}_{kind}" for name in MEANS for kind in ("mass", "share"))]
        self.index_of = {name: index for index, name in enumerate([*names, "rows"])}
        shape = (len(self.index_of), heads, bins)
        self.sums = torch.zeros(shape, dtype=torch.float64, device=device)
        self.choosing = torch.zeros(2, heads, bins, dtype=torch.float64, device=device)
        self.largest = torch.full((heads, bins), -torch.inf, dtype=torch.float64, device=device)
        self.norms: dict[str, Tensor] = {}
        self.known = set[str]()

    def add(
        self,
        seen: Observation,
        functions: Mapping[str, int],
        valid: Bool[Tensor, "b h t"],
        bin_of: Int[Tensor, "b h t"] | None,
    ) -> None:
        """Add a problem's rows; `functions` says which of its means is which."""
        rows = {
            "entropy": seen.entropy,
            "lse": seen.lse,
            "first_mass": seen.first,
            "rows": torch.ones_like(seen.entropy),
        }
        if seen.sink is not None:
            rows["sink_mass"] = seen.sink
        for name, index in functions.items():
            assert seen.mean is not None
            assert seen.even is not None
            rows[f"{name}_mass"] = seen.mean[index]
            rows[f"{name}_share"] = seen.even[index].expand(valid.shape).to(seen.entropy)
        self.known |= set(rows)
        for name, values in rows.items():
            self.sums[self.index_of[name]] += self._summed(values, valid, bin_of)
        choices = seen.choices.expand(valid.shape)
        several = valid & (choices >= 2)
        share = seen.entropy / choices.clamp(min=2).to(seen.entropy).log()
        self.choosing[0] += self._summed(share, several, bin_of)
        self.choosing[1] += self._summed(torch.ones_like(share), several, bin_of)
        self._raise(seen.largest, valid, bin_of)

    def _summed(self, values: Tensor, valid: Tensor, bin_of: Tensor | None) -> Tensor:
        """(H, P): sums over batch and queries, those that are not valid left out."""
        kept = values.masked_fill(~valid, 0.0)
        if bin_of is None:
            return kept.sum((0, 2), dtype=torch.float64)[:, None]
        heads = values.shape[1]
        room = torch.zeros(heads, self.bins, dtype=torch.float64, device=values.device)
        return room.scatter_add_(1, _by_head(bin_of), _by_head(kept).double())

    def _raise(self, values: Tensor, valid: Tensor, bin_of: Tensor | None) -> None:
        kept = values.masked_fill(~valid, -torch.inf).double()
        if bin_of is None:
            kept = kept.amax((0, 2))[:, None]
            self.largest = torch.maximum(self.largest, kept)
            return
        self.largest.scatter_reduce_(1, _by_head(bin_of), _by_head(kept), "amax")

    def add_norms(
        self,
        name: str,
        x: Float[Tensor, "b h t d"],
        padding: Bool[Tensor, "b t"] | None,
        bin_of: Int[Tensor, "b h t"] | None = None,
    ) -> None:
        """Add the norms of queries or keys that are not padding, each to the bin where it stands.

        `bin_of` is None where there is one bin.
        """
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        norms = torch.linalg.vector_norm(x.detach(), dim=-1, dtype=wide)
        if padding is not None and padding.shape == (x.shape[0], x.shape[2]):
            real = ~padding[:, None].expand(norms.shape)
        else:
            real = torch.ones_like(norms, dtype=torch.bool)
        both = torch.stack([norms, torch.ones_like(norms)])
        added = torch.stack([self._summed(values, real, bin_of) for values in both])
        self.norms[name] = self.norms[name] + added if name in self.norms else added

    def totals(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Every quantity that is known as a sum and its count, both (H, P) on the CPU.

        The largest logit is itself over 1, 0 over 0 where no pair was seen; norms of keys are by
        key head.
        """
        summed, largest = self.sums.cpu(), self.largest.cpu()
        rows = summed[self.index_of["rows"]]
        totals = {
            name: (summed[index], rows)
            for name, index in self.index_of.items()
            if name in self.known and name != "rows"
        }
        above, below = self.choosing.cpu()
        seen = largest.isfinite()
        totals["entropy_share"] = above, below
        totals["largest"] = largest.where(seen, 0.0), seen.double()
        for name, (total, count) in self.norms.items():
            totals[name] = total.cpu(), count.cpu()
        return totals

    def means(self) -> dict[str, list[float | None]]:
        """Every quantity by head, over all positions; None where there is no such number."""
        means = {}
        for name, (above, below) in self.totals().items():
            values = above.sum(-1) / below.sum(-1)
            if name == "largest":
                values = above.where(below > 0, -torch.inf).amax(-1)
            means[name] = [value if math.isfinite(value) else None for value in values.tolist()]
        return means

    def measured(self, edges: Sequence[int], layer: int) -> list[pl.DataFrame]:
        """Every quantity as rows of the frame, by head and bin of the position."""
        return [
            by_head(name, above, below, layer, "position", edges)
            for name, (above, below) in self.totals().items()
        ]


def by_head(
    name: str, above: Tensor, below: Tensor, layer: int, axis: str, edges: Sequence[float | int]
) -> pl.DataFrame:
    """Rows of the frame of sums and counts (H, P); what is not finite counts for nothing."""
    known = above.isfinite()
    values, counts = above.where(known, 0.0).numpy(), below.where(known, 0.0).numpy()
    return pl.concat(
        sums(
            *(name, [TEXTS], values[head, None], counts[head, None]),
            axis=axis,
            edges=edges,
            layer=layer,
            head=head,
        )
        for head in range(len(values))
    )


def _by_head(x: Tensor) -> Tensor:
    """(B, H, T) as (H, B·T)."""
    return x.transpose(0, 1).flatten(1)

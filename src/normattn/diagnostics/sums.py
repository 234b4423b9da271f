"""What one layer's softmax did, summed by head and bin of the query's position.

Legend: B batch, H query heads, T queries, F fields, P position bins.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normattn.kernels.observe import Observation

ROWS = ("entropy", "lse", "first_mass", "sink_mass")
MEANS = ("beyond", "angle")


class LayerSums:
    """Sums over queries, on the device of the model until they are asked for."""

    def __init__(self, heads: int, bins: int, device: torch.device) -> None:
        """Zeros."""
        self.bins = bins
        self.heads = heads
        names = [*ROWS, *(f"{name}_{kind}" for name in MEANS for kind in ("mass", "share"))]
        self.place = {name: index for index, name in enumerate([*names, "rows"])}
        shape = (len(self.place), heads, bins)
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
            self.sums[self.place[name]] += self._summed(values, valid, bin_of)
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
        found = torch.stack([self._summed(each, real, bin_of) for each in both])
        self.norms[name] = self.norms[name] + found if name in self.norms else found

    def grids(self) -> dict[str, list[list[float | None]]]:
        """Every field that is known as (H, P) means; None where no query was."""
        sums = self.sums.cpu()
        rows = sums[self.place["rows"]]
        found = {
            name: _rows(sums[index] / rows)
            for name, index in self.place.items()
            if name in self.known and name != "rows"
        }
        above, below = self.choosing.cpu()
        found["entropy_share"] = _rows(above / below)
        found["largest"] = _rows(self.largest.cpu())
        return found

    def counts(self) -> list[list[int]]:
        """How many queries stand behind every mean."""
        found: list[list[int]] = self.sums[self.place["rows"]].long().tolist()
        return found

    def mean_norms(self) -> dict[str, list[float | None]]:
        """The mean norms per head, by name."""
        return {
            name: _rows((total.sum(-1) / count.sum(-1))[None].cpu())[0]
            for name, (total, count) in self.norms.items()
        }

    def norm_grids(self) -> dict[str, list[list[float | None]]]:
        """The mean norms (H, P), by name; None where nothing stood."""
        return {name: _rows((total / count).cpu()) for name, (total, count) in self.norms.items()}


def _by_head(x: Tensor) -> Tensor:
    """(B, H, T) as (H, B·T)."""
    return x.transpose(0, 1).flatten(1)


def _rows(values: Tensor) -> list[list[float | None]]:
    """Numbers, and None for what is none."""
    return [
        [float(value) if finite else None for value, finite in zip(row, good, strict=True)]
        for row, good in zip(values.tolist(), values.isfinite().tolist(), strict=True)
    ]

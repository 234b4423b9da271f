"""Sum up what every layer's softmax does while a model runs, from what `stats` observes.

Legend: B batch, H heads, T queries, P bins of the query's position.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from normattn.kernels.cosines import cosine_counts
from normattn.kernels.inputs import AttentionInputs
from normattn.kernels.numerics import at_least_float32
from normattn.kernels.stats import Observation, Observer

Padding = tuple[Tensor | None, Tensor | None]
EXTREMES = {"largest": 1.0, "largest_cosine": 1.0, "least_cosine": -1.0}
"""Statistics that are extremes, and the sign under which each is a largest value."""


class LayerSums:
    """One layer's statistics by head and bin of the query's position.

    They stay on the model's device until they are asked for: sums and counts (2, H, P) by name,
    extremes (H, P), and the histogram of cosines (H, P, bins).
    """

    def __init__(self, bins: int) -> None:
        self.bins = bins
        self.cosines: Tensor | None = None
        self._sums: dict[str, Tensor] = {}
        self._extremes: dict[str, Tensor] = {}

    def add(
        self,
        values: Mapping[str, Tensor],
        valid: Bool[Tensor, "b h t"],
        bin_of: Int[Tensor, "b h t"] | None,
    ) -> None:
        """Add values (B, H, T) of those queries or keys that are valid; `bin_of` None: one bin."""
        count = self._reduced(torch.ones_like(valid, dtype=torch.float32), valid, bin_of, "sum")
        for name, each in values.items():
            added = torch.stack((self._reduced(each, valid, bin_of, "sum"), count))
            self._sums[name] = self._sums[name] + added if name in self._sums else added

    def add_largest(self, name: str, values: Tensor, valid: Tensor, bin_of: Tensor | None) -> None:
        """Take the largest of the valid values (B, H, T)."""
        self._raise(name, self._reduced(values, valid, bin_of, "amax"))

    def add_cosines(self, inputs: AttentionInputs, valid: Tensor, bin_of: Tensor | None) -> None:
        """Count cos(q, k) of the visible pairs of valid queries."""
        counted = cosine_counts(inputs, valid, bin_of, self.bins)
        counts = counted.counts.sum(0)
        self.cosines = counts if self.cosines is None else self.cosines + counts
        self._raise("least_cosine", -counted.least.amin(0).double())
        self._raise("largest_cosine", counted.most.amax(0).double())

    def _reduced(
        self, values: Tensor, valid: Tensor, bin_of: Tensor | None, reduce: str
    ) -> Shaped[Tensor, "h p"]:
        """Sums or largest values over batch and queries, those that are not valid left out."""
        empty = 0.0 if reduce == "sum" else -torch.inf
        by_head = values.masked_fill(~valid, empty).transpose(0, 1).flatten(1).double()
        if bin_of is None:
            return by_head.sum(-1, keepdim=True) if reduce == "sum" else by_head.amax(-1)[:, None]
        room = by_head.new_full((len(by_head), self.bins), empty)
        return room.scatter_reduce(1, bin_of.transpose(0, 1).flatten(1), by_head, reduce)

    def _raise(self, name: str, values: Tensor) -> None:
        before = self._extremes.get(name)
        self._extremes[name] = values if before is None else torch.maximum(before, values)

    def totals(self) -> dict[str, tuple[Float[Tensor, "h p"], Float[Tensor, "h p"]]]:
        """Every statistic as its sum and count, on the CPU.

        An extreme is itself over 1, 0 over 0 where no pair was seen; norms of keys are by key head.
        """
        totals = {name: (both[0].cpu(), both[1].cpu()) for name, both in self._sums.items()}
        for name, largest in self._extremes.items():
            values = EXTREMES[name] * largest.cpu()
            seen = values.isfinite()
            totals[name] = values.where(seen, 0.0), seen.double()
        return totals

    def means(self, names: Iterable[str]) -> dict[str, list[float | None]]:
        """These statistics by head, over all positions; None where there is no number.

        Those that were not seen are left out.
        """
        means: dict[str, list[float | None]] = {}
        totals = self.totals()
        for name in totals.keys() & set(names):
            above, below = totals[name]
            values = above.sum(-1) / below.sum(-1)
            if name in EXTREMES:
                values = above.where(below > 0, -torch.inf).amax(-1)
            means[name] = [value if math.isfinite(value) else None for value in values.tolist()]
        return means


class AttentionStatistics(Observer):
    """The observer of a model's layers; `names` are those of the layers that an owner serves.

    An owner is a `Score`, or the attention module of another library. `edges` bound bins of the
    query's position (None: one bin); `cosines` asks for those of queries and keys, which cost
    another product. A class that asks for functions of distance names them in `wanted`. `sums` has
    every layer that ran, in the order in which they did.
    """

    def __init__(
        self,
        names: Mapping[Any, Sequence[str]],
        edges: Sequence[int] | None = None,
        cosines: bool = False,
    ) -> None:
        self.names, self.edges, self.cosines = names, edges, cosines
        self.sums: dict[str, LayerSums] = {}
        self.wanted: list[str] = []
        self.owner: object = None
        self.layer: LayerSums | None = None
        self._padding: Padding = (None, None)
        self._at: tuple[Tensor, Tensor]
        self._part: tuple[slice, Tensor | None] = (slice(None), None)
        self.restart()

    def restart(self) -> None:
        """A shared block's next use is that of the lowest layer."""
        self._turns = {owner: itertools.cycle(names) for owner, names in self.names.items()}

    def enter(
        self, owner: Any, q: Tensor, k: Tensor, padding: Padding, at: tuple[Tensor, Tensor]
    ) -> None:
        """A layer begins; those of other models are left alone."""
        self._part, self._padding, self._at = (slice(None), None), padding, at
        self.owner, self.layer = owner, None
        if owner in self.names:
            bins = 1 if self.edges is None else len(self.edges) - 1
            self.layer = self.sums.setdefault(next(self._turns[owner]), LayerSums(bins))
            self.add_norms("q_norm", 0, q)
            self.add_norms("k_norm", 1, k)

    def confine(self, rows: slice, members: Tensor | None) -> None:
        """The next call is that of some rows."""
        self._part = rows, members

    def see(self, inputs: AttentionInputs, observation: Observation) -> None:
        """A call of the current layer has been computed."""
        (rows, members), self._part = self._part, (slice(None), None)
        layer, seen = self.layer, observation
        if layer is None:
            return
        valid = (seen.visible > 0).expand(seen.entropy.shape)
        if members is not None:
            valid = valid & members.reshape(-1, 1, members.shape[-1])
        if (padding := self._padding[0]) is not None:
            valid = valid & ~padding[:, None, rows]
        values = {"entropy": seen.entropy, "lse": seen.lse, "first_mass": seen.first}
        if seen.sink is not None:
            values["sink_mass"] = seen.sink
        if seen.mean is not None and seen.even is not None:
            for name, mass, share in zip(self.wanted, seen.mean, seen.even, strict=True):
                values[f"{name}_mass"], values[f"{name}_share"] = mass, share.expand(valid.shape)
        bin_of = self._bins(inputs.visibility.query, valid)
        layer.add(values, valid, bin_of)
        layer.add_largest("largest", seen.largest, valid, bin_of)
        choices = seen.choices.expand(valid.shape)
        share = seen.entropy / choices.clamp(min=2).to(seen.entropy).log()
        layer.add({"entropy_share": share}, valid & (choices >= 2), bin_of)
        if self.cosines:
            layer.add_cosines(inputs, valid, bin_of)

    def add_norms(self, name: str, side: int, x: Tensor, own_rows: bool = False) -> None:
        """Add the norms of queries (side 0) or keys (1) that are not padding, at their positions.

        `own_rows`: x are the rows of the present call alone.
        """
        if self.layer is None:
            return
        wide = at_least_float32(x.dtype)
        norms = torch.linalg.vector_norm(x.detach(), dim=-1, dtype=wide)
        rows = self._part[0] if own_rows else slice(None)
        rows = slice(0, x.shape[2]) if rows == slice(None) else rows
        real, padding = torch.ones_like(norms, dtype=torch.bool), self._padding[side]
        if padding is not None and padding[:, rows].shape == (x.shape[0], x.shape[2]):
            real = ~padding[:, None, rows].expand(norms.shape)
        self.layer.add({name: norms}, real, self._bins(self._at[side][..., rows], norms))

    def _bins(self, at: Tensor, like: Tensor) -> Tensor | None:
        """The bin of each position, (B, H, T) as `like` is; None where there is but one bin."""
        if self.edges is None:
            return None
        inner = torch.tensor(self.edges[1:-1], device=like.device)
        bins = torch.bucketize(at.contiguous(), inner, right=True)
        bins = bins[:, None] if bins.dim() == 2 else bins[None, None]
        return bins.expand(like.shape[:3])

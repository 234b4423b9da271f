"""Collect what every layer's softmax does while a model runs, streamed from its kernels.

Legend: B batch, H heads, T queries, P bins of the query's position.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import polars as pl
import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor, nn

from normattn.errors import InputError
from normattn.kernels import AttentionInputs
from normattn.kernels.cosines import BINS, cosine_counts
from normattn.kernels.stats import Observation, observing
from normattn.lab.diagnostics.angles import Stage, unseen_angles
from normattn.lab.diagnostics.lines import LayerLine
from normattn.lab.stats import sums
from normattn.score import Score

Padding = tuple[Tensor | None, Tensor | None]
COSINE_EDGES = torch.linspace(-1, 1, BINS + 1, dtype=torch.float64).tolist()
EXTREMES = {"largest": 1.0, "largest_cosine": 1.0, "least_cosine": -1.0}
"""Statistics that are extremes, and the sign under which each is a largest value."""


class Watcher:
    """An observer that asks for no means over keys and reads no announcements."""

    def enter(self, owner: Any, q: Tensor, k: Tensor, padding: Any, at: Any) -> None:
        """A layer begins."""

    def confine(self, rows: slice, own: Tensor | None) -> None:
        """The next call is that of some rows."""

    def functions(self, inputs: AttentionInputs) -> Tensor | None:
        """No means are wanted."""
        return None


class LayerSums:
    """One layer's statistics by head and bin of the query's position.

    They stay on the model's device until they are asked for: sums and counts (2, H, P) by name,
    extremes (H, P), and the histogram of cosines (H, P, bins).
    """

    def __init__(self, bins: int) -> None:
        self.bins = bins
        self._sums: dict[str, Tensor] = {}
        self._extremes: dict[str, Tensor] = {}
        self._cosines: Tensor | None = None

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
        self._cosines = counts if self._cosines is None else self._cosines + counts
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

    def totals(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Every statistic as its sum and count, both (H, P) on the CPU.

        An extreme is itself over 1, 0 over 0 where no pair was seen; norms of keys are by key head.
        """
        totals = {name: (both[0].cpu(), both[1].cpu()) for name, both in self._sums.items()}
        for name, largest in self._extremes.items():
            values = EXTREMES[name] * largest.cpu()
            seen = values.isfinite()
            totals[name] = values.where(seen, 0.0), seen.double()
        return totals

    def line(self) -> LayerLine:
        """Every statistic of a line by head, over all positions; None where there is no number."""
        means: dict[str, list[float | None]] = {}
        for name, (above, below) in self.totals().items():
            values = above.sum(-1) / below.sum(-1)
            if name in EXTREMES:
                values = above.where(below > 0, -torch.inf).amax(-1)
            if name in LayerLine.model_fields:
                means[name] = [value if math.isfinite(value) else None for value in values.tolist()]
        return LayerLine.model_validate(means)

    def measured(self, edges: Sequence[int], layer: int) -> list[pl.DataFrame]:
        """Every statistic as rows of the measurements table, by head and bin of the position."""
        parts = [
            _rows(name, above, below, layer, "position", edges)
            for name, (above, below) in self.totals().items()
        ]
        if self._cosines is not None:
            by_bin = self._cosines.double().cpu().unbind(1)
            for first, counts in zip(edges, by_bin, strict=False):
                rows = _rows("cosine", counts, counts, layer, "cosine", COSINE_EDGES)
                parts.append(rows.with_columns(pl.lit(float(first)).alias("factor.position")))
        return parts


def _rows(
    name: str, above: Tensor, below: Tensor, layer: int, axis: str, edges: Sequence[float | int]
) -> pl.DataFrame:
    """Rows of sums and counts (H, P); what is not finite counts for nothing."""
    known = above.isfinite()
    values, counts = above.where(known, 0.0).numpy(), below.where(known, 0.0).numpy()
    return pl.concat(
        sums(
            *(name, ["all texts"], values[head, None], counts[head, None]),
            axis=axis,
            edges=edges,
            layer=layer,
            head=head,
        )
        for head in range(len(values))
    )


class Collector(Watcher):
    """The observer of a model's layers; `names` are those of the layers that an owner serves.

    An owner is a `Score`, or the attention module of another library. `edges` bound bins of the
    query's position (None: one bin); `reach` asks for attention beyond the training length,
    `cosines` for those of queries and keys, which cost another product. `stages` say how scores
    were trained that were not trained as they were built.
    """

    def __init__(
        self,
        names: Mapping[Any, Sequence[str]],
        edges: Sequence[int] | None = None,
        reach: bool = False,
        cosines: bool = False,
        stages: Mapping[Score, Sequence[Stage]] | None = None,
    ) -> None:
        self.names, self.edges, self.reach, self.cosines = names, edges, reach, cosines
        self.stages = stages or {}
        self.sums: dict[str, LayerSums] = {}
        self._owner: object = None
        self._layer: LayerSums | None = None
        self._padding: Padding = (None, None)
        self._at: tuple[Tensor, Tensor]
        self._part: tuple[slice, Tensor | None] = (slice(None), None)
        self._wanted: list[str] = []
        self.restart()

    def restart(self) -> None:
        """A shared block's next use is that of the lowest layer."""
        self._turns = {owner: itertools.cycle(names) for owner, names in self.names.items()}

    def enter(
        self, owner: object, q: Tensor, k: Tensor, padding: Padding, at: tuple[Tensor, Tensor]
    ) -> None:
        """A layer begins; those of other models are left alone."""
        self._part, self._padding, self._at = (slice(None), None), padding, at
        self._owner, self._layer = owner, None
        if owner in self.names:
            bins = 1 if self.edges is None else len(self.edges) - 1
            self._layer = self.sums.setdefault(next(self._turns[owner]), LayerSums(bins))
            self._add_norms("q_norm", 0, q)
            self._add_norms("k_norm", 1, k)

    def confine(self, rows: slice, own: Tensor | None) -> None:
        """The next call is that of some rows."""
        self._part = rows, own

    def functions(self, inputs: AttentionInputs) -> Tensor | None:
        """Distances beyond the training length, and at unseen angles, where any can be."""
        self._wanted = []
        score = self._owner
        if self._layer is None or not isinstance(score, Score) or not self.reach:
            return None
        spec, length, mask = score.spec, score.spec.train_length, inputs.visibility
        if length is None:
            return None
        most = max(int(mask.query.max()), int(mask.key.max())) + 1
        functions = {"beyond": (torch.arange(most) >= length).double()}
        stages = self.stages.get(score, (Stage(score.built, length),))
        block = int(mask.query.min()) // length
        angles = unseen_angles(spec, score.head_dim, most, block, stages)
        if angles is not None:
            functions["angle"] = angles
        self._wanted = list(functions)
        return torch.stack(list(functions.values())).to(inputs.q.device)

    def see(self, inputs: AttentionInputs, observation: Observation) -> None:
        """A call of the current layer has been computed."""
        (rows, own), self._part = self._part, (slice(None), None)
        layer, seen = self._layer, observation
        if layer is None:
            return
        valid = (seen.visible > 0).expand(seen.entropy.shape)
        if own is not None:
            valid = valid & own.reshape(-1, 1, own.shape[-1])
        if (padding := self._padding[0]) is not None:
            valid = valid & ~padding[:, None, rows]
        values = {"entropy": seen.entropy, "lse": seen.lse, "first_mass": seen.first}
        if seen.sink is not None:
            values["sink_mass"] = seen.sink
        if seen.mean is not None and seen.even is not None:
            for name, mass, share in zip(self._wanted, seen.mean, seen.even, strict=True):
                values[f"{name}_mass"], values[f"{name}_share"] = mass, share.expand(valid.shape)
        bin_of = self._bins(inputs.visibility.query, valid)
        layer.add(values, valid, bin_of)
        layer.add_largest("largest", seen.largest, valid, bin_of)
        choices = seen.choices.expand(valid.shape)
        share = seen.entropy / choices.clamp(min=2).to(seen.entropy).log()
        layer.add({"entropy_share": share}, valid & (choices >= 2), bin_of)
        if self.cosines:
            layer.add_cosines(inputs, valid, bin_of)

    def normed(self, name: str, side: int) -> Callable[[nn.Module, Any, Tensor], None]:
        """A hook on a score's own normalisation of queries (0) or keys (1)."""

        def hook(module: nn.Module, given: Any, normed: Tensor) -> None:
            self._add_norms(name, side, normed, self._part[0] if side == 0 else slice(None))

        return hook

    def _add_norms(self, name: str, side: int, x: Tensor, rows: slice = slice(None)) -> None:
        """Add the norms of queries or keys that are no padding, each to the bin where it stands."""
        if self._layer is None:
            return
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        norms = torch.linalg.vector_norm(x.detach(), dim=-1, dtype=wide)
        rows = slice(0, x.shape[2]) if rows == slice(None) else rows
        real, padding = torch.ones_like(norms, dtype=torch.bool), self._padding[side]
        if padding is not None and padding[:, rows].shape == (x.shape[0], x.shape[2]):
            real = ~padding[:, None, rows].expand(norms.shape)
        self._layer.add({name: norms}, real, self._bins(self._at[side][..., rows], norms))

    def _bins(self, at: Tensor, like: Tensor) -> Tensor | None:
        """The bin of each position, (B, H, T) as `like` is; None where there is but one bin."""
        if self.edges is None:
            return None
        inner = torch.tensor(self.edges[1:-1], device=like.device)
        bins = torch.bucketize(at.contiguous(), inner, right=True)
        bins = bins[:, None] if bins.dim() == 2 else bins[None, None]
        return bins.expand(like.shape[:3])

    def lines(self) -> dict[str, LayerLine]:
        """Every layer that ran, in the order in which they did, over all positions."""
        return {name: layer.line() for name, layer in self.sums.items()}

    def measured(self) -> pl.DataFrame:
        """Every layer that ran, in that order, as rows by position; the factor `layer` names it."""
        assert self.edges is not None
        if not self.sums:
            raise InputError("nothing was read: no layer of the model ran while it was looked at")
        return pl.concat(
            [
                part.with_columns(pl.lit(name).alias("factor.layer"))
                for layer, (name, sums) in enumerate(self.sums.items())
                for part in sums.measured(self.edges, layer)
            ],
            how="diagonal",
        )


def layer_names(model: nn.Module) -> dict[Score, tuple[str, ...]]:
    """Every score of a model and the names of the layers that it serves, bottom first.

    A layer is named by its module's path; a block that several layers share has a name for each.
    """
    shared = [(path, module.layers) for path, module in model.named_modules() if _shared(module)]
    names: dict[Score, tuple[str, ...]] = {}
    for path, module in model.named_modules():
        if isinstance(module, Score):
            path = path.removesuffix("score").removesuffix(".")
            names[module] = (path,)
            for blocks, layers in shared:
                own = f"{blocks}." if blocks else ""
                if path.startswith(f"{own}0."):
                    rest = path.removeprefix(f"{own}0.")
                    names[module] = tuple(f"{own}{layer}.{rest}" for layer in range(layers))
    return names


def named_layers(model: nn.Module) -> dict[Score, tuple[str, ...]]:
    """`layer_names`; `InputError` for a model that has none."""
    names = layer_names(model)
    if not names:
        raise InputError("this model holds no Score to look at")
    return names


def _shared(module: nn.Module) -> bool:
    """Whether a list of blocks makes more layers than it holds."""
    return isinstance(module, nn.ModuleList) and getattr(module, "layers", 0) > len(module)


@contextmanager
def collecting(
    model: nn.Module,
    edges: Sequence[int] | None = None,
    *,
    reach: bool = False,
    cosines: bool = False,
    stages: Mapping[Score, Sequence[Stage]] | None = None,
) -> Iterator[Collector]:
    """Collect what the layers of `model` do while inside, for any number of forward passes.

    `reach`, `cosines` and `stages` as `Collector` has them. Nothing stays behind. A compiled model
    runs uncompiled meanwhile: a compiled graph cannot be looked into. Raises `InputError` for a
    model without any `Score`.
    """
    names = named_layers(model)
    collector = Collector(names, edges, reach, cosines, stages)
    with ExitStack() as stack:
        for score in names:
            for side, (name, norm) in enumerate(
                (("q_normed", score.query_norm), ("k_normed", score.key_norm))
            ):
                if norm is not None:
                    handle = norm.register_forward_hook(collector.normed(name, side))
                    stack.callback(handle.remove)
        for module in filter(_shared, model.modules()):
            handle = module.register_forward_pre_hook(lambda *_: collector.restart())
            stack.callback(handle.remove)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(observing(collector))
        yield collector

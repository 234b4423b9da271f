"""What softmax does with each row of scores, read from tiles while they are in the cache.

    lse_i = ln Σ_j exp s(i, j)        H_i = lse_i − Σ_j α_ij s(i, j)        α = softmax(s)

While an observer is on (`observing`), `attend` hands it an `Observation` of every call. No
T × S matrix is kept, nothing is added to the backward, and outputs are what the same kernel gives
unobserved. Without one it costs the reading of one context variable. `AttentionStatistics` sums up
what every layer of a model does.

Legend: B batch, H query heads, T queries, S keys, F functions of distance, R distances, P bins of
the query's position; n and l heads and rows of a tile, W its columns, X further logits (a sink).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from normattn.kernels.cosines import cosine_counts
from normattn.kernels.inputs import AttentionInputs
from normattn.kernels.numerics import at_least_float32
from normattn.kernels.tile_scores import TileScores, score_groups
from normattn.kernels.tiled import Plan, Tile

# Rows of a block in which visible keys are counted.
_ROWS = 256
Padding = tuple[Tensor | None, Tensor | None]
EXTREMES = {"largest": 1.0, "largest_cosine": 1.0, "least_cosine": -1.0}
"""Statistics that are extremes, and the sign under which each is a largest value."""


@dataclass(frozen=True)
class Observation:
    """What every query's softmax does, in the type of the scores but never in half precision.

    `lse` is the log-sum-exp and `entropy` the entropy in nats of all that softmax chooses among:
    the visible keys and, where there is one, the learned sink. `largest` is the largest logit of a
    visible key, `first` the weight on the key at position 0, `sink` that on the learned sink
    (None without one), `visible` how many keys it sees. `mean` holds Σ_j α_ij f(|i − j|) and
    `even` the mean of f(|i − j|) over the visible keys for each function f of distance that was
    asked for (None without any). A query that sees no key has −∞, 0, −∞, 0, 0 and 0.
    """

    lse: Float[Tensor, "b h t"]
    entropy: Float[Tensor, "b h t"]
    largest: Float[Tensor, "b h t"]
    first: Float[Tensor, "b h t"]
    sink: Float[Tensor, "b h t"] | None
    visible: Int[Tensor, "#b #h t"]
    mean: Float[Tensor, "f b h t"] | None
    even: Float[Tensor, "f #b #h t"] | None

    @property
    def choices(self) -> Int[Tensor, "#b #h t"]:
        """Among how many softmax chooses: the visible keys and the learned sink."""
        return self.visible if self.sink is None else self.visible + 1


class Observer:
    """Who gets the statistics of every call while `observing`; this one keeps nothing."""

    def enter_layer(
        self,
        owner: Any,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g s d"],
        padding: tuple[Bool[Tensor, "b t"] | None, Bool[Tensor, "b s"] | None],
        positions: tuple[Int[Tensor, "*bq t"], Int[Tensor, "*bk s"]],
    ) -> None:
        """The calls that follow are those of `owner`'s queries and keys, as they came in.

        `padding` is True where a query, and where a key, is padding.
        """

    def select_rows(self, rows: slice, members: Bool[Tensor, "*b t"] | None) -> None:
        """The next call is that of some rows, of which only the `members` (None: all) count."""

    def distance_functions(self, inputs: AttentionInputs) -> Float[Tensor, "f r"] | None:
        """Functions of distance 0 … R − 1 whose means are wanted, R beyond any that occurs."""
        return None

    def record(self, inputs: AttentionInputs, observation: Observation) -> None:
        """A call has been computed."""


_OBSERVERS: ContextVar[tuple[Observer, ...]] = ContextVar("normattn_observers", default=())


def observers() -> tuple[Observer, ...]:
    """Who observes now; nobody observes a compiled graph."""
    return () if torch.compiler.is_compiling() else _OBSERVERS.get()


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Hand `observer` the statistics of all that `attend` computes inside, in this thread.

    Who observes already gets them as well.
    """
    with _observed_by((*_OBSERVERS.get(), observer)):
        yield


@contextmanager
def unobserved(observed: bool) -> Iterator[None]:
    """Nobody gets statistics inside; kernels are those of `observed` calls all the same."""
    with _observed_by((Observer(),) if observed else ()):
        yield


@contextmanager
def _observed_by(members: tuple[Observer, ...]) -> Iterator[None]:
    token = _OBSERVERS.set(members)
    try:
        yield
    finally:
        _OBSERVERS.reset(token)


def announce_layer(
    owner: object,
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    query_padding: Bool[Tensor, "b t"] | None,
    key_padding: Bool[Tensor, "b s"] | None,
    query_positions: Int[Tensor, "*bq t"],
    key_positions: Int[Tensor, "*bk s"],
) -> None:
    """Say whose queries and keys come next, and at which positions, to all who observe."""
    padding, positions = (query_padding, key_padding), (query_positions, key_positions)
    for observer in observers():
        observer.enter_layer(owner, q, k, padding, positions)


class Recorder:
    """The statistics of one call in the making, to which a kernel shows tile after tile.

    `rows` (K, B, H, T) holds the largest logit, the largest weight, Σ α (s − the largest logit),
    the weights on the first key and on a sink, and the means of `functions` of distance.
    """

    def __init__(
        self, inputs: AttentionInputs, functions: Float[Tensor, "f r"] | None = None
    ) -> None:
        """Room for every row."""
        q, wide = inputs.q, at_least_float32(inputs.q.dtype)
        self.inputs, self.functions = inputs, functions
        self._fixed = 4 + (inputs.sink is not None)
        count = self._fixed + (0 if functions is None else len(functions))
        self.rows = q.new_zeros(count, *q.shape[:3], dtype=wide)
        self.rows[0] = -torch.inf

    def means(self, weights: Tensor, distance: Tensor) -> list[Tensor]:
        """Σ_j α_ij f(distance) of each function, (…, rows), of weights (…, rows, W)."""
        functions = () if self.functions is None else self.functions.to(self.rows.dtype)
        return [(weights * function[distance]).sum(-1) for function in functions]

    def summary(
        self, score: Tensor, weight: Tensor, width: int, first: Tensor | None, means: list[Tensor]
    ) -> Tensor:
        """What is kept of a tile's rows, (K, n, l).

        `score` (n, l, W + X) is overwritten; `weight` is its softmax, `first` (n, l) the weight on
        the first token (where positions are aligned, on the first column).
        """
        values = self.rows.new_zeros(self.rows.shape[0], *score.shape[:2])
        torch.amax(score[..., :width], -1, out=values[0])
        torch.amax(weight, -1, out=values[1])
        if first is not None:
            values[3] = first
        if self.inputs.sink is not None:
            values[4] = weight[..., width]
        for index, mean in enumerate(means, self._fixed):
            values[index] = mean.reshape(values.shape[1:])
        top = values[0]
        if score.shape[-1] > width:
            top = torch.maximum(top, score[..., width:].amax(-1))
        # Σ α (s − top): small where it counts, so that no digits cancel. 0 · −∞ must be 0.
        least = torch.finfo(score.dtype).min
        score.sub_(top.unsqueeze(-1)).clamp_(min=least).mul_(weight)
        torch.sum(score, -1, out=values[2])
        return values

    @torch.no_grad()
    def observation(self) -> Observation:
        """What has been shown."""
        largest, most, expected, first, *rest = self.rows
        mask, sink = self.inputs.mask, self.inputs.sink
        visible, even = _visible(self.inputs, self.functions)
        none, spread = visible == 0, -most.log()
        top = largest if sink is None else torch.maximum(largest, sink.to(largest)[:, None])
        if mask.aligned and mask.key.numel():
            # Tiles gave the weight on their first column: whether it is the first token is
            # decided here.
            first = first * (mask.key[..., 0] == 0)
        return Observation(
            lse=(top + spread).masked_fill_(none, -torch.inf),
            entropy=(spread - expected).clamp_(min=0.0).masked_fill_(none, 0.0),
            largest=largest.masked_fill(none, -torch.inf),
            first=first,
            sink=None if sink is None else rest[0].masked_fill(none, 0.0),
            visible=visible,
            mean=None if self.functions is None else self.rows[self._fixed :],
            even=even,
        )


@torch.no_grad()
def record_rows(
    recorder: Recorder,
    inputs: AttentionInputs,
    score: Float[Tensor, "b h t s"],
    weight: Float[Tensor, "b h t s"],
    rows: slice,
) -> None:
    """Record the scores and weights of some inputs, which are `rows` of the recorder's."""
    mask, sink, every, width = inputs.mask, inputs.sink, slice(None), score.shape[-1]
    if not width:
        return
    logits = score
    if inputs.normaliser is not None:
        # Shares of a row's weight are the softmax of its logarithm.
        weight = weight / weight.sum(-1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
        score = weight.log().clamp(min=torch.finfo(weight.dtype).min)
    is_first = mask.key == 0
    first = (weight * (is_first if is_first.dim() == 1 else is_first[:, None, None])).sum(-1)
    means = recorder.means(weight, mask.distance(every, every).abs())
    if sink is not None:
        rest = sink.to(score)[None, :, None, None].expand(*score.shape[:3], 1)
        score = torch.cat((score, rest), -1)
        weight = torch.cat((weight, 1 - weight.sum(-1, keepdim=True)), -1)
    flat = score.flatten(0, 1).clone(), weight.flatten(0, 1)
    kept = recorder.rows[..., rows]
    kept.copy_(recorder.summary(*flat, width, first.flatten(0, 1), means).view(kept.shape))
    if inputs.normaliser is not None:
        # A row without any weight has the entropy of one that has it all in one place.
        kept[0] = logits.amax(-1)
        kept[1].masked_fill_(weight.amax(-1) == 0, 1.0)


def record_tile(recorder: Recorder, scores: TileScores, tile: Tile) -> None:
    """Record the scores and weights of a tile that `scores` has just made, and kept."""
    if scores.kept is None or not tile.width:
        return
    (score, weight), group, repeat = scores.kept, scores.group, scores.plan.repeat
    first, means = [], []
    for span, where in tile.placed:
        if not group.mask.aligned:
            # A query sees one key at position 0 at most.
            key = (group.mask.key[..., span.columns] == 0)[..., None, :]
            on_first = scores.spread(key[:, None] if key.dim() == 3 else key)
            first.append((scores.by_head(weight)[..., where] * on_first).sum(-1).flatten(2))
        elif span.start == 0:
            first.append(weight[..., where.start])
        if recorder.functions is not None:
            distance = scores.spread(group.mask.distance(tile.rows, span.columns).abs())
            means.append(recorder.means(scores.by_head(weight)[..., where], distance))
    on_first_key = (
        torch.stack([x.reshape(score.shape[:2]) for x in first]).sum(0) if first else None
    )
    sums = [torch.stack(spans).sum(0) for spans in zip(*means, strict=True)]
    values = recorder.summary(score, weight, tile.width, on_first_key, sums)
    by_head = torch.unflatten(recorder.rows, 2, (-1, repeat))
    kept = by_head[:, group.batch, group.heads, :, tile.rows].transpose(3, 4)
    values = values.view(kept.shape)
    kept.copy_(values.flip(3) if scores.plan.backwards else values)


@torch.no_grad()
def record_pass(recorder: Recorder, inputs: AttentionInputs) -> None:
    """Record inputs that another kernel computes: scores and weights once more, by tiles."""
    wide = inputs.widened()
    for scores in score_groups(wide, Plan.of(wide)):
        for tile in scores.group.tiles:
            scores.weights(tile, keep=True)
            record_tile(recorder, scores, tile)


def _visible(inputs: AttentionInputs, functions: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """How many keys each query sees, (1|B, 1|H, T), and the means of functions over them."""
    mask, keys, queries = inputs.mask, inputs.v.shape[2], inputs.q.shape[2]
    device = mask.key.device
    counts, evens, every = [], [], slice(0, keys)
    for start in range(0, max(1, queries), _ROWS):
        rows = slice(start, min(start + _ROWS, queries))
        hidden, added = mask.hidden(rows, every), mask.additive(rows, every)
        visible = torch.ones((1, 1, rows.stop - start, keys), dtype=torch.bool, device=device)
        visible = visible if hidden is None else visible & ~hidden
        visible = visible if added is None else visible & (added > -torch.inf)
        counts.append(visible.sum(-1))
        if functions is not None:
            table = functions[:, mask.distance(rows, every).abs()]
            table = table if table.dim() == 5 else table[:, None, None]
            evens.append((table * visible).sum(-1) / counts[-1].clamp(min=1))
    return torch.cat(counts, -1), torch.cat(evens, -1) if evens else None


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
            known = values.isfinite()
            totals[name] = values.where(known, 0.0), known.double()
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
        self._positions: tuple[Tensor, Tensor]
        self._part: tuple[slice, Tensor | None] = (slice(None), None)
        self.restart()

    def restart(self) -> None:
        """A shared block's next use is that of the lowest layer."""
        self._turns = {owner: itertools.cycle(names) for owner, names in self.names.items()}

    def enter_layer(
        self, owner: Any, q: Tensor, k: Tensor, padding: Padding, positions: tuple[Tensor, Tensor]
    ) -> None:
        """A layer begins; those of other models are left alone."""
        self._part, self._padding, self._positions = (slice(None), None), padding, positions
        self.owner, self.layer = owner, None
        if owner in self.names:
            bins = 1 if self.edges is None else len(self.edges) - 1
            self.layer = self.sums.setdefault(next(self._turns[owner]), LayerSums(bins))
            self.add_norms("q_norm", 0, q)
            self.add_norms("k_norm", 1, k)

    def select_rows(self, rows: slice, members: Tensor | None) -> None:
        """The next call is that of some rows."""
        self._part = rows, members

    def record(self, inputs: AttentionInputs, observation: Observation) -> None:
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
        bin_of = self._bins(inputs.mask.query, valid)
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
        self.layer.add({name: norms}, real, self._bins(self._positions[side][..., rows], norms))

    def _bins(self, at: Tensor, like: Tensor) -> Tensor | None:
        """The bin of each position, (B, H, T) as `like` is; None where there is but one bin."""
        if self.edges is None:
            return None
        inner = torch.tensor(self.edges[1:-1], device=like.device)
        bins = torch.bucketize(at.contiguous(), inner, right=True)
        bins = bins[:, None] if bins.dim() == 2 else bins[None, None]
        return bins.expand(like.shape[:3])

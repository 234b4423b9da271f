"""Statistics of softmax: largest logits, entropies, weight on the first key and on sinks.

    lse_i = ln Σ_j exp s(i, j)        H_i = lse_i − Σ_j α_ij s(i, j)        α = softmax(s)

While an observer is active (`observing`), `run_kernel` gives it an `Observation` of every call. No
T × S matrix is stored, the backward does not change, and outputs equal those without statistics.
Without an observer the cost is one context variable. `AttentionStatistics` sums them over a model.

Legend: B batch, H query heads, T queries, S keys, F functions of distance, R distances, P bins of
the query's position; n and l heads and rows of a tile, W its columns, X extra columns (a sink).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
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
from normattn.kernels.tiled import Tile, TilePlan

# Query rows for which visible keys are counted at once.
_COUNT_ROWS = 256
Padding = tuple[Tensor | None, Tensor | None]
EXTREMES = {"largest": 1.0, "largest_cosine": 1.0, "least_cosine": -1.0}
"""Statistics that are extremes. Each is stored times this sign, as a largest value."""


@dataclass(frozen=True)
class Observation:
    """Statistics of every query's softmax, in float32 or wider.

    For a query that sees no key, lse and largest are −∞ and all others 0.

    Attributes:
        lse, entropy: log-sum-exp, and entropy in nats, over the visible keys and a learned sink.
        largest: the largest logit of a visible key.
        first: the weight on the key at position 0.
        sink: the weight on the learned sink; None without one.
        visible: the number of visible keys.
        mean: Σ_j α_ij f(|i − j|) for each requested function f of distance; None without any.
        even: the mean of f(|i − j|) over the visible keys.
    """

    lse: Float[Tensor, "b h t"]
    entropy: Float[Tensor, "b h t"]
    largest: Float[Tensor, "b h t"]
    first: Float[Tensor, "b h t"]
    sink: Float[Tensor, "b h t"] | None
    visible: Int[Tensor, "#b #h t"]
    mean: Float[Tensor, "f b h t"] | None
    even: Float[Tensor, "f #b #h t"] | None


class Observer:
    """Gets the statistics of every call while `observing`; this base class ignores them."""

    def enter_layer(
        self,
        owner: Any,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g s d"],
        padding: tuple[Bool[Tensor, "b t"] | None, Bool[Tensor, "b s"] | None],
        positions: tuple[Int[Tensor, "*bq t"], Int[Tensor, "*bk s"]],
    ) -> None:
        """Start a layer: the next calls belong to `owner`, with these queries and keys.

        `padding` is True where a query, and where a key, is padding.
        """

    def select_rows(self, rows: slice, members: Bool[Tensor, "*b t"] | None) -> None:
        """Announce that the next call has only these rows; only the `members` count (None: all)."""

    def distance_functions(self, inputs: AttentionInputs) -> Float[Tensor, "f r"] | None:
        """The functions of distance 0 … R − 1 to average; every distance must be below R."""
        return None

    def record(self, inputs: AttentionInputs, observation: Observation) -> None:
        """Take the statistics of a call."""


_OBSERVERS: ContextVar[tuple[Observer, ...]] = ContextVar("normattn_observers", default=())


def observers() -> tuple[Observer, ...]:
    """The active observers; none in a compiled graph."""
    return () if torch.compiler.is_compiling() else _OBSERVERS.get()


@contextmanager
def _set_observers(observers: tuple[Observer, ...]) -> Iterator[None]:
    token = _OBSERVERS.set(observers)
    try:
        yield
    finally:
        _OBSERVERS.reset(token)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Also give `observer` the statistics of all calls inside, in this thread."""
    with _set_observers((*_OBSERVERS.get(), observer)):
        yield


def unobserved(observed: bool) -> AbstractContextManager[None]:
    """Suspend all observers inside; `observed` still chooses the kernels of observed calls."""
    return _set_observers((Observer(),) if observed else ())


def announce_layer(
    owner: Any, q: Tensor, k: Tensor, padding: Padding, positions: tuple[Tensor, Tensor]
) -> None:
    """Announce the next layer to all active observers (`Observer.enter_layer`)."""
    for observer in observers():
        observer.enter_layer(owner, q, k, padding, positions)


class Recorder:
    """Collects the statistics of one call, tile by tile.

    `rows` (K, B, H, T) holds the largest logit, the largest weight, Σ α (s − the largest logit),
    the weights on the first key and on a sink, and the means of `functions` of distance.
    """

    def __init__(
        self, inputs: AttentionInputs, functions: Float[Tensor, "f r"] | None = None
    ) -> None:
        q, dtype = inputs.q, at_least_float32(inputs.q.dtype)
        self.inputs, self.functions = inputs, functions
        self._first_mean = 4 + (inputs.sink is not None)
        count = self._first_mean + (0 if functions is None else len(functions))
        self.rows = q.new_zeros(count, *q.shape[:3], dtype=dtype)
        self.rows[0] = -torch.inf

    def summary(
        self, score: Tensor, weight: Tensor, width: int, is_first: Tensor, distance: Tensor
    ) -> Shaped[Tensor, "k *rows"]:
        """The statistics of rows of scores (…, l, W + X), which are overwritten.

        `weight` is their softmax. `is_first` marks the key at position 0 and `distance` is |i − j|,
        both broadcastable to (…, l, W).
        """
        values = self.rows.new_zeros(self.rows.shape[0], *score.shape[:-1])
        weight_of_keys = weight[..., :width]
        torch.amax(score[..., :width], -1, out=values[0])
        torch.amax(weight, -1, out=values[1])
        torch.sum(weight_of_keys * is_first, -1, out=values[3])
        if self.inputs.sink is not None:
            values[4] = weight[..., width]
        functions = () if self.functions is None else self.functions.to(self.rows.dtype)
        for index, function in enumerate(functions, self._first_mean):
            torch.sum(weight_of_keys * function[distance], -1, out=values[index])
        top = values[0]
        if score.shape[-1] > width:
            top = torch.maximum(top, score[..., width:].amax(-1))
        # Σ α (s − top) loses no digits: terms are small where α is large. The clamp makes 0 · −∞ 0.
        lowest = torch.finfo(score.dtype).min
        score.sub_(top.unsqueeze(-1)).clamp_(min=lowest).mul_(weight)
        torch.sum(score, -1, out=values[2])
        return values

    @torch.no_grad()
    def observation(self) -> Observation:
        """The statistics of all rows."""
        largest, top_weight, expected, first, *others = self.rows
        visible, even = _count_visible(self.inputs, self.functions)
        # ln Σ exp(s − top), from the largest weight 1 / Σ exp(s − top).
        sink, empty, spread = self.inputs.sink, visible == 0, -top_weight.log()
        top = largest if sink is None else torch.maximum(largest, sink.to(largest)[:, None])
        return Observation(
            lse=(top + spread).masked_fill_(empty, -torch.inf),
            entropy=(spread - expected).clamp_(min=0.0).masked_fill_(empty, 0.0),
            largest=largest.masked_fill(empty, -torch.inf),
            first=first,
            sink=None if sink is None else others[0].masked_fill(empty, 0.0),
            visible=visible,
            mean=None if self.functions is None else self.rows[self._first_mean :],
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
    """Record whole rows of scores and weights: `rows` of the recorder's queries."""
    mask, sink, width = inputs.mask, inputs.sink, score.shape[-1]
    if not width:
        return
    logits = score
    if inputs.normaliser is not None:
        # Weights divided by their sum are the softmax of their logarithms.
        weight = weight / weight.sum(-1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
        score = weight.log().clamp(min=torch.finfo(weight.dtype).min)
    is_first, distance = mask.key == 0, mask.distance(slice(None), slice(None)).abs()
    is_first = is_first if is_first.dim() == 1 else is_first[:, None, None]
    if sink is not None:
        sink_logit = sink.to(score)[None, :, None, None].expand(*score.shape[:3], 1)
        score = torch.cat((score, sink_logit), -1)
        weight = torch.cat((weight, 1 - weight.sum(-1, keepdim=True)), -1)
    target = recorder.rows[..., rows]
    target.copy_(recorder.summary(score.clone(), weight, width, is_first, distance))
    if inputs.normaliser is not None:
        # A row without any weight gets entropy 0, as if one key had it all.
        target[0] = logits.amax(-1)
        target[1].masked_fill_(weight.amax(-1) == 0, 1.0)


def record_tile(recorder: Recorder, scores: TileScores, tile: Tile) -> None:
    """Record the tile whose scores and weights `scores` has just computed (`kept_tile`)."""
    if scores.kept_tile is None or not tile.width:
        return
    score, weight = (scores.split_heads(x) for x in scores.kept_tile)
    group, columns = scores.group, [span.columns for span in tile.spans]
    key = torch.cat([group.mask.key[..., x] for x in columns], -1)
    is_first = scores.to_tile_order((key == 0).view(-1, 1, 1, tile.width))
    distances = [group.mask.distance(tile.rows, x).abs() for x in columns]
    distance = scores.to_tile_order(torch.cat(distances, -1))
    values = recorder.summary(score, weight, tile.width, is_first, distance)
    by_group = torch.unflatten(recorder.rows, 2, (-1, scores.plan.repeat))
    target = by_group[:, group.batch, group.heads, :, tile.rows].transpose(3, 4)
    target.copy_(values.flip(3) if scores.plan.last_row_first else values)


@torch.no_grad()
def record_pass(recorder: Recorder, inputs: AttentionInputs) -> None:
    """Record inputs for a kernel without statistics: compute scores and weights again, by tiles."""
    inputs = inputs.upcast()
    for scores in score_groups(inputs, TilePlan.of(inputs)):
        for tile in scores.group.tiles:
            scores.weights(tile, keep=True)
            record_tile(recorder, scores, tile)


def _count_visible(
    inputs: AttentionInputs, functions: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The number of keys that each query sees, (1|B, 1|H, T), and the means of functions."""
    mask, keys, queries = inputs.mask, inputs.v.shape[2], inputs.q.shape[2]
    device = mask.key.device
    counts, means, columns = [], [], slice(0, keys)
    for start in range(0, max(1, queries), _COUNT_ROWS):
        rows = slice(start, min(start + _COUNT_ROWS, queries))
        hidden, added = mask.hidden(rows, columns), mask.additive(rows, columns)
        visible = torch.ones((1, 1, rows.stop - start, keys), dtype=torch.bool, device=device)
        visible = visible if hidden is None else visible & ~hidden
        visible = visible if added is None else visible & (added > -torch.inf)
        counts.append(visible.sum(-1))
        if functions is not None:
            table = functions[:, mask.distance(rows, columns).abs()]
            table = table if table.dim() == 5 else table[:, None, None]
            means.append((table * visible).sum(-1) / counts[-1].clamp(min=1))
    return torch.cat(counts, -1), torch.cat(means, -1) if means else None


class LayerSums:
    """One layer's statistics, by head and by bin of the query's position.

    `totals` moves them to the CPU; until then they stay on the model's device. They are sums and
    counts (2, H, P) by name, extremes (H, P), and the histogram of cosines (H, P, bins).
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
        """Add values (B, H, T) of the valid queries or keys; without `bin_of` there is one bin."""
        count = self.reduce(torch.ones_like(valid, dtype=torch.float32), valid, bin_of, "sum")
        for name, x in values.items():
            added = torch.stack((self.reduce(x, valid, bin_of, "sum"), count))
            self._sums[name] = self._sums[name] + added if name in self._sums else added

    def reduce(
        self, values: Tensor, valid: Tensor, bin_of: Tensor | None, reduce: str
    ) -> Shaped[Tensor, "h p"]:
        """Reduce the valid values (B, H, T) by "sum" or "amax"."""
        empty = 0.0 if reduce == "sum" else -torch.inf
        by_head = values.masked_fill(~valid, empty).transpose(0, 1).flatten(1).double()
        if bin_of is None:
            return by_head.sum(-1, keepdim=True) if reduce == "sum" else by_head.amax(-1)[:, None]
        result = by_head.new_full((len(by_head), self.bins), empty)
        return result.scatter_reduce(1, bin_of.transpose(0, 1).flatten(1), by_head, reduce)

    def keep_largest(self, name: str, values: Float[Tensor, "h p"]) -> None:
        """Keep the larger of each value and what was added before."""
        previous = self._extremes.get(name)
        self._extremes[name] = values if previous is None else torch.maximum(previous, values)

    def totals(self) -> dict[str, tuple[Float[Tensor, "h p"], Float[Tensor, "h p"]]]:
        """The sum and count of every statistic, on the CPU.

        An extreme has count 1, or 0 and 0 if no pair was visible. Norms of keys are by key head.
        """
        totals = {name: (x[0].cpu(), x[1].cpu()) for name, x in self._sums.items()}
        for name, largest in self._extremes.items():
            values = EXTREMES[name] * largest.cpu()
            known = values.isfinite()
            totals[name] = values.where(known, 0.0), known.double()
        return totals

    def means(self, names: Iterable[str]) -> dict[str, list[float | None]]:
        """The statistics `names` by head, over all positions; None where undefined."""
        means: dict[str, list[float | None]] = {}
        totals = self.totals()
        for name in totals.keys() & set(names):
            total, count = totals[name]
            extreme = total.where(count > 0, -torch.inf).amax(-1)
            values = extreme if name in EXTREMES else total.sum(-1) / count.sum(-1)
            means[name] = [value if math.isfinite(value) else None for value in values.tolist()]
        return means


class AttentionStatistics(Observer):
    """An observer that adds up the statistics of a model's layers.

    `names` has the names of the layers that use an owner: a `Score`, or the attention module of
    another library. `edges` bound the bins of the query's position (None: one bin). `cosines` also
    counts the cosines of queries and keys, for one more product. Subclasses with functions of
    distance name them in `function_names`. `sums` has every layer that ran, in that order.
    """

    def __init__(
        self,
        names: Mapping[Any, Sequence[str]],
        edges: Sequence[int] | None = None,
        cosines: bool = False,
    ) -> None:
        self.names, self.edges, self.cosines = names, edges, cosines
        self.sums: dict[str, LayerSums] = {}
        self.function_names: list[str] = []
        self.owner: object = None
        self.layer: LayerSums | None = None
        self._padding: Padding = (None, None)
        self._positions: tuple[Tensor, Tensor]
        self._selected: tuple[slice, Tensor | None] = (slice(None), None)
        self.restart()

    def restart(self) -> None:
        """Start again at the lowest layer of each shared block."""
        self._next_names = {owner: itertools.cycle(names) for owner, names in self.names.items()}

    def enter_layer(
        self, owner: Any, q: Tensor, k: Tensor, padding: Padding, positions: tuple[Tensor, Tensor]
    ) -> None:
        """Start a layer; layers of other models are ignored."""
        self._selected, self._padding, self._positions = (slice(None), None), padding, positions
        self.owner, self.layer = owner, None
        if owner in self.names:
            bins = 1 if self.edges is None else len(self.edges) - 1
            self.layer = self.sums.setdefault(next(self._next_names[owner]), LayerSums(bins))
            self.add_norms("q_norm", 0, q)
            self.add_norms("k_norm", 1, k)

    def select_rows(self, rows: slice, members: Tensor | None) -> None:
        """Select the rows of the next call."""
        self._selected = rows, members

    def record(self, inputs: AttentionInputs, observation: Observation) -> None:
        """Add the statistics of a call of the current layer."""
        (rows, members), self._selected = self._selected, (slice(None), None)
        layer = self.layer
        if layer is None:
            return
        valid = (observation.visible > 0).expand(observation.entropy.shape)
        if members is not None:
            valid = valid & members.reshape(-1, 1, members.shape[-1])
        if (padding := self._padding[0]) is not None:
            valid = valid & ~padding[:, None, rows]
        entropy, first = observation.entropy, observation.first
        values = {"entropy": entropy, "lse": observation.lse, "first_mass": first}
        if observation.sink is not None:
            values["sink_mass"] = observation.sink
        if observation.mean is not None and observation.even is not None:
            for name, mass, share in zip(
                self.function_names, observation.mean, observation.even, strict=True
            ):
                values[f"{name}_mass"], values[f"{name}_share"] = mass, share.expand(valid.shape)
        bin_of = self._bins(inputs.mask.query, valid)
        layer.add(values, valid, bin_of)
        layer.keep_largest("largest", layer.reduce(observation.largest, valid, bin_of, "amax"))
        # The logits of a row: the visible keys and the learned sink.
        choices = (observation.visible + (observation.sink is not None)).expand(valid.shape)
        share = entropy / choices.clamp(min=2).to(entropy).log()
        layer.add({"entropy_share": share}, valid & (choices >= 2), bin_of)
        if self.cosines:
            counts, least, most = cosine_counts(inputs, valid, bin_of, layer.bins)
            layer.cosines = counts.sum(0) + (0 if layer.cosines is None else layer.cosines)
            layer.keep_largest("least_cosine", -least.amin(0).double())
            layer.keep_largest("largest_cosine", most.amax(0).double())

    def add_norms(self, name: str, side: int, x: Tensor, own_rows: bool = False) -> None:
        """Add the norms of queries (side 0) or keys (side 1) that are not padding.

        `own_rows`: x has only the rows of the current call.
        """
        if self.layer is None:
            return
        dtype = at_least_float32(x.dtype)
        norms = torch.linalg.vector_norm(x.detach(), dim=-1, dtype=dtype)
        rows = self._selected[0] if own_rows else slice(None)
        rows = slice(0, x.shape[2]) if rows == slice(None) else rows
        valid, padding = torch.ones_like(norms, dtype=torch.bool), self._padding[side]
        if padding is not None and padding[:, rows].shape == (x.shape[0], x.shape[2]):
            valid = ~padding[:, None, rows].expand(norms.shape)
        self.layer.add({name: norms}, valid, self._bins(self._positions[side][..., rows], norms))

    def _bins(self, positions: Tensor, like: Tensor) -> Tensor | None:
        """The bin of each position, (B, H, T) like `like`; None if there is one bin."""
        if self.edges is None:
            return None
        inner = torch.tensor(self.edges[1:-1], device=like.device)
        bins = torch.bucketize(positions.contiguous(), inner, right=True)
        bins = bins[:, None] if bins.dim() == 2 else bins[None, None]
        return bins.expand(like.shape[:3])

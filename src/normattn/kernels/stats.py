"""What softmax does with each row of scores, read from tiles while they are in the cache.

    lse_i = ln Σ_j exp s(i, j)        H_i = lse_i − Σ_j α_ij s(i, j)        α = softmax(s)

While an observer is on (`observing`), `attend` hands it an `Observation` of every call. No
T × S matrix is kept, nothing is added to the backward, and outputs are what the same kernel gives
unobserved. Without one it costs the reading of one context variable.

Legend: B batch, H query heads, T queries, S keys, F functions of distance, R distances; n and l
heads and rows of a tile, W its columns, X further logits (a sink).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normattn.kernels.inputs import AttentionInputs, AttentionMask
from normattn.kernels.numerics import at_least_float32
from normattn.kernels.tile_scores import TileScores, score_groups
from normattn.kernels.tiled import Plan, Tile

# Rows of a block in which visible keys are counted.
_ROWS = 256


@dataclass(frozen=True)
class Observation:
    """What every query's softmax does, in the type of the scores but never in half precision.

    `lse` is the log-sum-exp and `entropy` the entropy in nats of all that softmax chooses among:
    the visible keys and, where there is one, the learned sink. `largest` is the largest logit of a
    visible key, `first` the weight on the key at position 0, `sink` that on the learned sink
    (None without one), `visible` how many keys are seen. `mean` holds Σ_j α_ij f(|i − j|) and
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

    def enter(
        self,
        owner: Any,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g s d"],
        padding: tuple[Bool[Tensor, "b t"] | None, Bool[Tensor, "b s"] | None],
        at: tuple[Int[Tensor, "*bq t"], Int[Tensor, "*bk s"]],
    ) -> None:
        """The calls that follow are those of `owner`'s queries and keys, as they came in.

        `padding` is True where a query, and where a key, is padding; `at` are their positions.
        """

    def confine(self, rows: slice, members: Bool[Tensor, "*b t"] | None) -> None:
        """The next call is that of some rows, of which only the `members` (None: all) count."""

    def functions(self, inputs: AttentionInputs) -> Float[Tensor, "f r"] | None:
        """Functions of distance 0 … R − 1 whose means are wanted, R beyond any that occurs."""
        return None

    def see(self, inputs: AttentionInputs, observation: Observation) -> None:
        """A call has been computed."""


_OBSERVER: ContextVar[Observer | None] = ContextVar("normattn_observer", default=None)


def observer() -> Observer | None:
    """Who observes now; nobody observes a compiled graph."""
    return None if torch.compiler.is_compiling() else _OBSERVER.get()


class _Both(Observer):
    """Two observers of the same calls, of which one at most asks for functions of distance."""

    def __init__(self, first: Observer, second: Observer) -> None:
        self._members = (first, second)

    def enter(self, *call: Any) -> None:
        for member in self._members:
            member.enter(*call)

    def confine(self, *rows: Any) -> None:
        for member in self._members:
            member.confine(*rows)

    def functions(self, inputs: AttentionInputs) -> Tensor | None:
        wanted = [member.functions(inputs) for member in self._members]
        return next((functions for functions in wanted if functions is not None), None)

    def see(self, *seen: Any) -> None:
        for member in self._members:
            member.see(*seen)


@contextmanager
def observing(by: Observer) -> Iterator[None]:
    """Hand `by` the statistics of all that `attend` computes inside, in this thread.

    Who observes already gets them as well.
    """
    before = _OBSERVER.get()
    token = _OBSERVER.set(by if before is None else _Both(before, by))
    try:
        yield
    finally:
        _OBSERVER.reset(token)


@contextmanager
def unseen(observed: bool) -> Iterator[None]:
    """Nobody gets statistics inside; kernels are those of `observed` calls all the same."""
    token = _OBSERVER.set(Observer() if observed else None)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


def announce(
    owner: object,
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    query_padding: Bool[Tensor, "b t"] | None,
    key_padding: Bool[Tensor, "b s"] | None,
    query_at: Int[Tensor, "*bq t"],
    key_at: Int[Tensor, "*bk s"],
) -> None:
    """Say whose queries and keys come next, and at which positions, if someone observes."""
    by = observer()
    if by is not None:
        by.enter(owner, q, k, (query_padding, key_padding), (query_at, key_at))


def confine(rows: slice, members: Bool[Tensor, "*b t"] | None) -> None:
    """Say which rows of them come next, if someone observes."""
    by = observer()
    if by is not None:
        by.confine(rows, members)


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
        seen, sink = self.inputs.visibility, self.inputs.sink
        visible, even = _visible(self.inputs, self.functions)
        none, spread = visible == 0, -most.log()
        top = largest if sink is None else torch.maximum(largest, sink.to(largest)[:, None])
        if seen.aligned and seen.key.numel():
            # Tiles gave the weight on their first column: whether it is the first token is
            # decided here.
            first = first * (seen.key[..., 0] == 0)
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
    seen, sink, every, width = inputs.visibility, inputs.sink, slice(None), score.shape[-1]
    if not width:
        return
    logits = score
    if inputs.normaliser is not None:
        # Shares of a row's weight are the softmax of its logarithm.
        weight = weight / weight.sum(-1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
        score = weight.log().clamp(min=torch.finfo(weight.dtype).min)
    is_first = seen.key == 0
    first = (weight * (is_first if is_first.dim() == 1 else is_first[:, None, None])).sum(-1)
    means = recorder.means(weight, seen.distance(every, every).abs())
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
        if not group.seen.aligned:
            # A query sees one key at position 0 at most.
            key = (group.seen.key[..., span.columns] == 0)[..., None, :]
            on_first = scores.spread(key[:, None] if key.dim() == 3 else key)
            first.append((scores.by_head(weight)[..., where] * on_first).sum(-1).flatten(2))
        elif span.start == 0:
            first.append(weight[..., where.start])
        if recorder.functions is not None:
            distance = scores.spread(group.seen.distance(tile.rows, span.columns).abs())
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
    seen, keys, queries = inputs.visibility, inputs.v.shape[2], inputs.q.shape[2]
    if functions is None and seen.regular:
        return _counted(seen, keys)[None, None], None
    counts, evens, every = [], [], slice(0, keys)
    for start in range(0, max(1, queries), _ROWS):
        rows = slice(start, min(start + _ROWS, queries))
        visible = _is_visible(seen, rows, every)
        counts.append(visible.sum(-1))
        if functions is not None:
            table = functions[:, seen.distance(rows, every).abs()]
            table = table if table.dim() == 5 else table[:, None, None]
            evens.append((table * visible).sum(-1) / counts[-1].clamp(min=1))
    return torch.cat(counts, -1), torch.cat(evens, -1) if evens else None


def _is_visible(seen: AttentionMask, rows: slice, columns: slice) -> Bool[Tensor, "b h t s"]:
    """True where a key is seen."""
    shape = rows.stop - rows.start, columns.stop - columns.start
    visible = torch.ones((1, 1, *shape), dtype=torch.bool, device=seen.key.device)
    hidden, added = seen.hidden(rows, columns), seen.added(rows, columns)
    visible = visible if hidden is None else visible & ~hidden
    return visible if added is None else visible & (added > -torch.inf)


def _counted(seen: AttentionMask, keys: int) -> Int[Tensor, " t"]:
    """The keys that each query sees where only aligned causality and a window hide any."""
    if not keys or not (seen.causal or seen.window is not None):
        return torch.full((seen.query.shape[-1],), keys, device=seen.query.device)
    at = seen.query - seen.key[0]
    stop = (at + 1 if seen.causal else torch.full_like(at, keys)).clamp(0, keys)
    if seen.window is None:
        return stop
    # The keys that every query sees, then those in the window.
    kept = torch.minimum(stop, (seen.kept - seen.key[0]).clamp(min=0)) if seen.kept else 0 * stop
    start = torch.maximum(at - seen.window + 1, kept)
    return kept + (torch.minimum(stop, at + seen.window) - start).clamp(min=0)

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
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normattn.kernels.inputs import AttentionInputs, AttentionMask
from normattn.kernels.tile_scores import TileScores, Workspace
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


@runtime_checkable
class Observer(Protocol):
    """Whoever is told of every call while `observing`."""

    def enter(
        self,
        owner: object,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g s d"],
        padding: tuple[Bool[Tensor, "b t"] | None, Bool[Tensor, "b s"] | None],
        at: tuple[Int[Tensor, "*bq t"], Int[Tensor, "*bk s"]],
    ) -> None:
        """The calls that follow are those of `owner`'s queries and keys, as they came in.

        `padding` is True where a query, and where a key, is padding; `at` are their positions.
        """
        ...

    def confine(self, rows: slice, own: Bool[Tensor, "*b t"] | None) -> None:
        """The next call is that of some rows, of which only those in `own` (None: all) count."""
        ...

    def functions(self, inputs: AttentionInputs) -> Float[Tensor, "f r"] | None:
        """Functions of distance 0 … R − 1 whose means are wanted, R beyond any that occurs."""
        ...

    def see(self, inputs: AttentionInputs, observation: Observation) -> None:
        """A call has been computed."""
        ...


_OBSERVER: ContextVar[Observer | None] = ContextVar("normattn_observer", default=None)


def observer() -> Observer | None:
    """Who observes now. A compiled graph has no such look aside: it is never observed."""
    return None if torch.compiler.is_compiling() else _OBSERVER.get()


@contextmanager
def observing(by: Observer) -> Iterator[None]:
    """Tell `by` of every inputs that `attend` computes, while inside and in this thread."""
    token = _OBSERVER.set(by)
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
    """Say whose queries and keys come next, and where they stand, if someone observes."""
    by = observer()
    if by is not None:
        by.enter(owner, q, k, (query_padding, key_padding), (query_at, key_at))


def confine(rows: slice, own: Bool[Tensor, "*b t"] | None) -> None:
    """Say which rows of them come next, if someone observes."""
    by = observer()
    if by is not None:
        by.confine(rows, own)


class Eye:
    """The observation of one call in the making; a kernel shows it tile after tile."""

    def __init__(
        self, inputs: AttentionInputs, functions: Float[Tensor, "f r"] | None = None
    ) -> None:
        """Room for every row."""
        q = inputs.q
        self.inputs, self.functions = inputs, functions
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.names = ["largest", "most", "expected", "first"]
        self.names += ["sink"] if inputs.sink is not None else []
        count = len(self.names) + (0 if functions is None else functions.shape[0])
        self.room = q.new_zeros(count, *q.shape[:3], dtype=wide)
        self.room[0] = -torch.inf

    def means(self, weights: Tensor, distance: Tensor) -> list[Tensor]:
        """Σ_j α_ij f(distance) of each function, (…, rows), of weights (…, rows, W)."""
        functions = () if self.functions is None else self.functions.to(self.room.dtype)
        return [(weights * function[distance]).sum(-1) for function in functions]

    def summary(
        self, score: Tensor, weight: Tensor, width: int, first: Tensor | None, means: list[Tensor]
    ) -> Tensor:
        """What is kept of a tile's rows, (K, n, l).

        `score` (n, l, W + X) is overwritten; `weight` is its softmax, `first` (n, l) the weight on
        the first token (where positions are aligned, on the first column).
        """
        values = self.room.new_zeros(self.room.shape[0], *score.shape[:2])
        torch.amax(score[..., :width], -1, out=values[0])
        torch.amax(weight, -1, out=values[1])
        if first is not None:
            values[3] = first
        if "sink" in self.names:
            values[4] = weight[..., width]
        top = values[0]
        if score.shape[-1] > width:
            top = torch.maximum(top, score[..., width:].amax(-1))
        for index, mean in enumerate(means, len(self.names)):
            values[index] = mean.reshape(values.shape[1:])
        # Σ α (s − top): small where it counts, so that no digits cancel. 0 · −∞ must be 0.
        least = torch.finfo(score.dtype).min
        score.sub_(top.unsqueeze(-1)).clamp_(min=least).mul_(weight)
        torch.sum(score, -1, out=values[2])
        return values

    @torch.no_grad()
    def observation(self) -> Observation:
        """What has been shown."""
        quantities = dict(zip(self.names, self.room, strict=False))
        visible, even = _visible(self.inputs, self.functions)
        top, sink = quantities["largest"], self.inputs.sink
        if sink is not None:
            top = torch.maximum(top, sink.to(top)[:, None])
        none = visible == 0
        spread = -quantities["most"].log()
        lse = (top + spread).masked_fill_(none, -torch.inf)
        entropy = (spread - quantities["expected"]).clamp_(min=0.0).masked_fill_(none, 0.0)
        largest = quantities["largest"].masked_fill(none, -torch.inf)
        taken = None if sink is None else quantities["sink"].masked_fill(none, 0.0)
        first = quantities["first"]
        if self.inputs.visibility.aligned and self.inputs.visibility.key.numel():
            # Tiles told of their first column: whether it is the first token is asked once.
            first = first * (self.inputs.visibility.key[..., 0] == 0)
        mean = None if self.functions is None else self.room[len(self.names) :]
        return Observation(lse, entropy, largest, first, taken, visible, mean, even)


@torch.no_grad()
def show_whole(
    eye: Eye,
    inputs: AttentionInputs,
    score: Float[Tensor, "b h t s"],
    weight: Float[Tensor, "b h t s"],
    rows: slice,
) -> None:
    """Let an eye read the scores and weights of some inputs, which are its `rows`, as one tile."""
    seen, sink, every = inputs.visibility, inputs.sink, slice(None)
    logits = score
    if inputs.normaliser is not None:
        # Shares of a row's weight are the softmax of its logarithm.
        weight = weight / weight.sum(-1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
        score = weight.log().clamp(min=torch.finfo(weight.dtype).min)
    shape, width = score.shape[:3], score.shape[-1]
    if not width:
        return
    is_first = seen.key == 0
    if is_first.dim() == 2:
        is_first = is_first[:, None, None]
    if sink is not None:
        rest = sink.to(score)[None, :, None, None].expand(*shape, 1)
        score = torch.cat((score, rest), -1)
        weight = torch.cat((weight, 1 - weight.sum(-1, keepdim=True)), -1)

    shares = weight.detach()[..., :width]
    first = (shares * is_first).sum(-1).flatten(0, 1)
    means = eye.means(shares, seen.distance(every, every).abs())
    flat = score.detach().flatten(0, 1).clone(), weight.detach().flatten(0, 1)
    own = eye.room[..., rows]
    own.copy_(eye.summary(*flat, width, first, means).view(own.shape))
    if inputs.normaliser is not None:
        # The room is in the order of the eye's names: the largest logit, the largest weight. A row
        # without any weight has the entropy of one that has it all in one place.
        eye.room[0][:, :, rows] = logits.detach().amax(-1).to(eye.room.dtype)
        eye.room[1][:, :, rows].masked_fill_(weight.detach().amax(-1) == 0, 1.0)


def _visible(inputs: AttentionInputs, functions: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """How many keys each query sees, (1|B, 1|H, T), and the means of functions over them."""
    seen, keys = inputs.visibility, inputs.v.shape[2]
    if functions is None and seen.regular:
        return _counted(seen, keys)[None, None], None
    counts, evens = [], []
    queries, every = inputs.q.shape[2], slice(0, keys)
    for start in range(0, queries, _ROWS):
        rows = slice(start, min(start + _ROWS, queries))
        open_ = _open(seen, rows, every)
        count = open_.sum(-1)
        counts.append(count)
        if functions is not None:
            table = functions[:, seen.distance(rows, every).abs()]
            table = table if table.dim() == 5 else table[:, None, None]
            total = (table * open_).sum(-1)
            evens.append(total / count.clamp(min=1))
    if not counts:
        none = torch.zeros(1, 1, 0, dtype=torch.int64, device=inputs.q.device)
        return none, None if functions is None else functions.new_zeros(len(functions), 1, 1, 0)
    return torch.cat(counts, -1), torch.cat(evens, -1) if evens else None


def _open(seen: AttentionMask, rows: slice, columns: slice) -> Bool[Tensor, "b h t s"]:
    """True where a key is seen."""
    shape = (1, 1, rows.stop - rows.start, columns.stop - columns.start)
    hidden = seen.hidden(rows, columns)
    if hidden is None:
        hidden = torch.zeros(shape, dtype=torch.bool, device=seen.key.device)
    added = seen.added(rows, columns)
    if added is not None:
        hidden = hidden | (added == -torch.inf)
    while hidden.dim() < 4:
        hidden = hidden[None]
    return ~hidden.expand(*hidden.shape[:2], *shape[2:])


def _counted(seen: AttentionMask, keys: int) -> Int[Tensor, " t"]:
    """The keys that each query sees where only aligned causality and a window hide any."""
    queries = seen.query.shape[-1]
    if not keys or not (seen.causal or seen.window is not None):
        return torch.full((queries,), keys, device=seen.query.device)
    at = seen.query - seen.key[0]
    last = (at if seen.causal else torch.full_like(at, keys - 1)).clamp(max=keys - 1)
    if seen.window is None:
        return (last + 1).clamp(min=0)
    low, high = (at - seen.window + 1).clamp(min=0), torch.minimum(last, at + seen.window - 1)
    # Keys that are kept, left and right of the window.
    kept = (seen.kept - seen.key[0]).clamp(min=0) if seen.kept else 0
    before = torch.minimum(torch.minimum(low, last + 1), low.new_tensor(0) + kept)
    after = torch.minimum(last, low.new_tensor(-1) + kept) - torch.maximum(high, low - 1)
    return (high - low + 1).clamp(min=0) + before.clamp(min=0) + after.clamp(min=0)


def show_tile(eye: Eye, scores: TileScores, tile: Tile) -> None:
    """Let an eye read the scores and weights that `scores` has just made, and kept."""
    if scores.pair is None or not tile.width:
        return
    (score, weight), group, repeat = scores.pair, scores.group, scores.plan.repeat
    seen = group.seen
    first = (_by_column if seen.aligned else _by_mask)(scores, tile, weight)
    means: list[Tensor] = []
    if eye.functions is not None:
        parts = []
        for span, where in tile.laid:
            distance = scores.spread(seen.distance(tile.rows, span.columns).abs())
            shares = scores.apart(weight)[..., where]
            parts.append(eye.means(shares, scores.turned(distance)))
        means = [torch.stack(spans).sum(0) for spans in zip(*parts, strict=True)]
    values = eye.summary(score, weight, tile.width, first, [x.flatten(2) for x in means])
    apart = eye.room.view(*eye.room.shape[:2], -1, repeat, eye.room.shape[-1])
    own = apart[:, group.batch, group.heads, :, tile.rows].transpose(3, 4)
    values = values.view(own.shape)
    own.copy_(values.flip(3) if scores.plan.backwards else values)


def _by_column(rows: TileScores, tile: Tile, weight: Tensor) -> Tensor | None:
    """The weight on the first column, the only one that can be the first token."""
    columns = [weight[..., where.start] for span, where in tile.laid if span.start == 0]
    if not columns:
        return None
    return columns[0] if len(columns) == 1 else columns[0] + columns[1]


def _by_mask(rows: TileScores, tile: Tile, weight: Tensor) -> Tensor:
    """The weight on the keys at position 0, of which a query sees one at most."""
    parts = []
    for span, where in tile.laid:
        first = (rows.group.seen.key[..., span.columns] == 0)[..., None, :]
        first = first[:, None] if first.dim() == 3 else first
        parts.append((rows.apart(weight)[..., where] * rows.spread(first)).sum(-1))
    return torch.stack(parts).sum(0).flatten(0, 1).flatten(1)


@torch.no_grad()
def look_over(inputs: AttentionInputs, eye: Eye) -> None:
    """Show every tile of some inputs that another kernel computes: scores and weights once more."""
    inputs = inputs.widened()
    plan, space = Plan.of(inputs), Workspace()
    for group in plan.groups(inputs.q):
        scores = TileScores(inputs, plan, group, space)
        for tile in group.tiles:
            scores.weights(tile, kept=True)
            show_tile(eye, scores, tile)

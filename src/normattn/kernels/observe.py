"""What softmax does to a problem's rows, read from a kernel's tiles while they are in the cache.

    lse_i = ln Σ_j exp s(i, j)        H_i = lse_i − Σ_j α_ij s(i, j)        α = softmax(s)

While an observer is on (`observing`), `attend` hands it an `Observation` of every problem. No
T × S matrix is kept, nothing is added to the backward, and outputs are what the same kernel gives
unobserved. Without one it costs the reading of one context variable.

Legend: B batch, H query heads, T queries, S keys, F functions of distance, R distances; n and l
heads and rows of a tile, W its columns, X further logits (a sink).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normattn.kernels.problem import Problem
from normattn.kernels.visibility import Visibility

# Rows of a block in which visible keys are counted.
_ROWS = 256
Put = Callable[[Tensor, Tensor], object]


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
    """Whoever is told of every problem while `observing`."""

    def enter(
        self,
        owner: object,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g s d"],
        padding: tuple[Bool[Tensor, "b t"] | None, Bool[Tensor, "b s"] | None],
        at: tuple[Int[Tensor, "*bq t"], Int[Tensor, "*bk s"]],
    ) -> None:
        """The problems that follow are those of `owner`'s queries and keys, as they came in.

        `padding` is True where a query, and where a key, is padding; `at` are their positions.
        """
        ...

    def confine(self, rows: slice, own: Bool[Tensor, "*b t"] | None) -> None:
        """The next problem is that of some rows, of which only those in `own` (None: all) count."""
        ...

    def functions(self, problem: Problem) -> Float[Tensor, "f r"] | None:
        """Functions of distance 0 … R − 1 whose means are wanted, R beyond any that occurs."""
        ...

    def see(self, problem: Problem, observation: Observation) -> None:
        """A problem has been computed."""
        ...


_OBSERVER: ContextVar[Observer | None] = ContextVar("normattn_observer", default=None)


def observer() -> Observer | None:
    """Who observes now. A compiled graph has no such look aside: it is never observed."""
    return None if torch.compiler.is_compiling() else _OBSERVER.get()


@contextmanager
def observing(by: Observer) -> Iterator[None]:
    """Tell `by` of every problem that `attend` computes, while inside and in this thread."""
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


@dataclass(frozen=True)
class Looked:
    """What a kernel says of a tile that it shows: `width` columns are keys.

    `first` takes the weights to the one on the first token, (n, l), None where the tile lacks it;
    where positions are aligned, that on the first column.
    `mean` takes the weights and a function of distance to its mean, (n, l).
    """

    width: int
    first: Callable[[Tensor], Tensor | None]
    mean: Callable[[Tensor, Tensor], Tensor]


class Eye:
    """The observation of one problem in the making; a kernel shows it tile after tile."""

    def __init__(self, problem: Problem, functions: Float[Tensor, "f r"] | None = None) -> None:
        """Room for every row."""
        q = problem.q
        self.problem, self.functions = problem, functions
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.names = ["largest", "most", "expected", "first"]
        self.names += ["sink"] if problem.sink is not None else []
        count = len(self.names) + (0 if functions is None else functions.shape[0])
        self.room = q.new_zeros(count, *q.shape[:3], dtype=wide)
        self.room[0] = -torch.inf
        self._scratch: Tensor | None = None

    def show(self, score: Tensor, weight: Tensor, at: Looked, put: Put) -> None:
        """Read a tile: `score` (n, l, W + X), which is overwritten, and its softmax `weight`.

        `put(rooms, values)` writes values (K, n, l) to where these rows belong in (K, B, H, T).
        """
        width, wide = at.width, score.dtype == self.room.dtype
        values = self.room.new_zeros(self.room.shape[0], *score.shape[:2])
        _largest(score[..., :width], values[0])
        _largest(weight, values[1])
        if (first := at.first(weight)) is not None:
            values[3] = first
        if "sink" in self.names:
            values[4] = weight[..., width]
        top = values[0]
        if score.shape[-1] > width:
            top = torch.maximum(top, score[..., width:].amax(-1))
        if self.functions is not None:
            full = weight.to(values.dtype)
            for index, function in enumerate(self.functions, len(self.names)):
                values[index] = at.mean(full, function.to(values.dtype))
        # Σ α (s − top): small where it counts, so that no digits cancel. 0 · −∞ must be 0.
        apart = score if wide else self._aside(score)
        least = torch.finfo(score.dtype).min
        apart.sub_(top.unsqueeze(-1)).clamp_(min=least).mul_(weight)
        torch.sum(apart, -1, out=values[2])
        put(self.room, values)

    def _aside(self, score: Tensor) -> Tensor:
        """A copy in the type of the results, in room that is taken once."""
        if self._scratch is None or self._scratch.numel() < score.numel():
            self._scratch = self.room.new_empty(score.numel())
        return self._scratch[: score.numel()].view(score.shape).copy_(score)

    @torch.no_grad()
    def observation(self) -> Observation:
        """What has been shown."""
        quantities = dict(zip(self.names, self.room, strict=False))
        visible, even = _visible(self.problem, self.functions)
        top, sink = quantities["largest"], self.problem.sink
        if sink is not None:
            top = torch.maximum(top, sink.to(top)[:, None])
        none = visible == 0
        spread = -quantities["most"].log()
        lse = (top + spread).masked_fill_(none, -torch.inf)
        entropy = (spread - quantities["expected"]).clamp_(min=0.0).masked_fill_(none, 0.0)
        largest = quantities["largest"].masked_fill(none, -torch.inf)
        taken = None if sink is None else quantities["sink"].masked_fill(none, 0.0)
        first = quantities["first"]
        if self.problem.visibility.aligned and self.problem.visibility.key.numel():
            # Tiles told of their first column: whether it is the first token is asked once.
            first = first * (self.problem.visibility.key[..., 0] == 0)
        mean = None if self.functions is None else self.room[len(self.names) :]
        return Observation(lse, entropy, largest, first, taken, visible, mean, even)


@torch.no_grad()
def show_whole(
    eye: Eye,
    problem: Problem,
    score: Float[Tensor, "b h t s"],
    weight: Float[Tensor, "b h t s"],
    rows: slice,
) -> None:
    """Let an eye read the scores and weights of a problem, which are its `rows`, as one tile."""
    seen, sink, every = problem.visibility, problem.sink, slice(None)
    logits = score
    if problem.normaliser is not None:
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

    def apart(weight: Tensor) -> Tensor:
        return weight.view(*shape, -1)[..., :width]

    def first(weight: Tensor) -> Tensor:
        return (apart(weight) * is_first).sum(-1).flatten(0, 1)

    def mean(weight: Tensor, function: Tensor) -> Tensor:
        return (apart(weight) * function[seen.distance(every, every).abs()]).sum(-1).flatten(0, 1)

    def put(rooms: Tensor, values: Tensor) -> None:
        own = rooms[:, :, :, rows]
        own.copy_(values.view(own.shape))

    flat = (score.detach().flatten(0, 1).clone(), weight.detach().flatten(0, 1))
    eye.show(*flat, Looked(width, first, mean), put)
    if problem.normaliser is not None:
        # The room is in the order of the eye's names: the largest logit, the largest weight. A row
        # without any weight has the entropy of one that has it all in one place.
        eye.room[0][:, :, rows] = logits.detach().amax(-1).to(eye.room.dtype)
        eye.room[1][:, :, rows].masked_fill_(weight.detach().amax(-1) == 0, 1.0)


def _largest(x: Tensor, into: Tensor) -> None:
    """The largest of the last axis; half precision on a CPU as integers, which is ten times faster.

    The bits of numbers from 0 on grow with the number, those of negative ones with its size.
    """
    if x.dtype == into.dtype:
        torch.amax(x, -1, out=into)
    elif x.device.type != "cpu":
        into.copy_(x.amax(-1))
    else:
        bits = x.view(torch.int16)
        most = bits.amax(-1)
        below = most < 0
        if below.any():
            most = torch.where(below, bits.amin(-1), most)
        into.copy_(most.view(x.dtype))


def _visible(problem: Problem, functions: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """How many keys each query sees, (1|B, 1|H, T), and the means of functions over them."""
    seen, keys = problem.visibility, problem.v.shape[2]
    if functions is None and seen.regular:
        return _counted(seen, keys)[None, None], None
    counts, evens = [], []
    queries, every = problem.q.shape[2], slice(0, keys)
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
        none = torch.zeros(1, 1, 0, dtype=torch.int64, device=problem.q.device)
        return none, None if functions is None else functions.new_zeros(len(functions), 1, 1, 0)
    return torch.cat(counts, -1), torch.cat(evens, -1) if evens else None


def _open(seen: Visibility, rows: slice, columns: slice) -> Bool[Tensor, "b h t s"]:
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


def _counted(seen: Visibility, keys: int) -> Int[Tensor, " t"]:
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

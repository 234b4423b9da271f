"""Attention by tiles with its backward, and as one node of a compiled graph.

The backward computes the weights of a tile once more instead of keeping them. Gradients of keys and
values gather over tiles transposed, (n, D, S): the products gradᵀ · weights then read the weights
row by row. Where one tile holds all columns nothing gathers, and weightsᵀ · grad is written in its
place at once, 1.6 to 9 times faster than by way of sums.

Legend: B batch, H query heads, G key heads, r query heads per key head, T queries, S keys, D score
size, E value size, R distances; n = b·g key heads of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.kernels.inputs import LEARNED, AttentionInputs, AttentionMask
from normattn.kernels.numerics import flushing, refuse_second_derivative
from normattn.kernels.stats import Eye, show_tile
from normattn.kernels.tiled import (
    Group,
    Plan,
    Tile,
    TileScores,
    grouped,
    product,
    times,
    ungrouped,
)

MakeScores = Callable[[AttentionInputs, Plan, Group], TileScores]
"""How the scores of a group of heads are made: `TileScores`, or residual ones."""


@flushing
def forward_tiles(
    inputs: AttentionInputs,
    plan: Plan,
    seed: int = 0,
    make: MakeScores = TileScores,
    eye: Eye | None = None,
) -> Float[Tensor, "b h t e"]:
    """softmax(score) · v in the type of the (wide) inputs; `eye` looks at every tile."""
    q, v = inputs.q, inputs.v
    out = v.new_empty(*grouped(q, plan.repeat).shape[:-1], v.shape[-1])
    number = 0
    for group in plan.groups(q):
        scores = make(inputs, plan, group)
        target = out[group.batch, group.heads].flatten(0, 1).flatten(1, 2)
        for tile in plan.tiles:
            scores.enter(tile)
            weight = scores.weights(tile, kept=eye is not None)
            if eye is not None:
                show_tile(eye, scores, tile)
            if inputs.dropout:
                weight[..., : tile.width] *= keep_mask(weight, tile, inputs.dropout, seed + number)
            scores.values(weight, tile, target[:, scores.lines(tile)])
            number += 1
    return ungrouped(out)


@flushing
def backward_tiles(
    inputs: AttentionInputs,
    plan: Plan,
    by_out: Float[Tensor, "b h t e"],
    seed: int = 0,
    make: MakeScores = TileScores,
) -> Gradients:
    """The gradients, the weights computed once more."""
    sums = Gradients.like(inputs, plan)
    by_out = grouped(by_out, plan.repeat)
    number = 0
    for group in plan.groups(inputs.q):
        scores = make(inputs, plan, group)
        part = _GroupGradients(sums, scores)
        grad = by_out[group.batch, group.heads].flatten(0, 1).flatten(1, 2)
        for tile in plan.tiles:
            weight = scores.weights(tile, capped=True)
            here = grad[:, scores.lines(tile)]
            by_weight = _by_weight(scores, here, tile)
            used = weight
            if inputs.dropout:
                keep = keep_mask(weight, tile, inputs.dropout, seed + number)
                used = weight[..., : tile.width] * keep
                by_weight[..., : tile.width] *= keep
            part.add_values(here, used, tile)
            torch._softmax_backward_data(by_weight, weight, -1, weight.dtype, grad_input=by_weight)
            part.add_scores(by_weight, tile)
            scores.leave(tile)
            number += 1
        part.close()
    return sums


def keep_mask(weight: Tensor, tile: Tile, rate: float, seed: int) -> Tensor:
    """The dropout mask of a tile, over 1 − rate; the same in forward and backward."""
    generator = torch.Generator(device=weight.device)
    generator.manual_seed(seed)
    shape = (*weight.shape[:-1], tile.width)
    keep = torch.rand(shape, generator=generator, device=weight.device) >= rate
    return keep.to(weight.dtype) / (1 - rate)


def draw_seed(inputs: AttentionInputs) -> int:
    """The seed of the dropout of some inputs."""
    return int(torch.randint(2**62, ()).item()) if inputs.dropout else 0


def _by_weight(scores: TileScores, by_out: Tensor, tile: Tile) -> Tensor:
    """⟨by_out, v⟩, (n, c·r, W + X); 0 for the further logits, whose values are 0."""
    result = scores.room("gradient", tile)
    result[..., tile.width :] = 0
    for span, where in tile.laid():
        product(by_out, scores.v[:, span.columns].transpose(1, 2), result[..., where])
    return result


@dataclass
class Gradients:
    """Of q and far_q as (B, G, T, r, D); of k, v, far_k, bias and sink like them."""

    q: Tensor
    k: Tensor
    v: Tensor
    far_q: Tensor | None
    far_k: Tensor | None
    bias: Tensor | None
    sink: Tensor | None

    @staticmethod
    def like(inputs: AttentionInputs, plan: Plan) -> Gradients:
        """Room for all of them, whatever the layout of the operands."""
        p = inputs

        def queries() -> Tensor:
            b, h, t, d = p.q.shape
            return p.q.new_empty(b, h // plan.repeat, t, plan.repeat, d)

        def same(x: Tensor) -> Tensor:
            return x.new_empty(x.shape)

        def sums(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.new_zeros(x.shape, dtype=p.q.dtype)

        far = p.far_k
        return Gradients(
            queries(),
            same(p.k),
            same(p.v),
            None if far is None else queries(),
            None if far is None else same(far),
            sums(p.bias),
            sums(p.sink),
        )

    def all(self, inputs: AttentionInputs) -> tuple[Tensor | None, ...]:
        """In the order of `AttentionInputs.tensors`, in their shapes and types."""
        far_q = None if self.far_q is None else ungrouped(self.far_q)
        own = (ungrouped(self.q), self.k, self.v, far_q, self.far_k, self.bias, self.sink)
        return tuple(
            None if x is None or mine is None else mine.to(x.dtype)
            for x, mine in zip(inputs.tensors, own, strict=True)
        )


class _Columns:
    """The gradient of some heads' keys or values, `into` (n, S, D), column by column."""

    def __init__(self, into: Tensor, at_once: bool) -> None:
        """Zero sums over tiles; none where the only product is written `at_once`."""
        self.into = into
        n, s, d = into.shape
        self.sums = None if at_once else into.new_zeros(n, d, s)

    def add(self, rows: Tensor, weight: Tensor, columns: slice) -> None:
        """Add weightᵀ (n, s, c) · rows (n, c, D) to `columns`."""
        if self.sums is None:
            torch.bmm(weight.transpose(1, 2), rows, out=self.into)
        else:
            self.sums[..., columns].baddbmm_(rows.transpose(1, 2), weight)

    def close(self) -> None:
        """Write the sums where they belong."""
        if self.sums is not None:
            self.into.copy_(self.sums.transpose(1, 2))


class _GroupGradients:
    """The sums of one group; `close` writes them where they belong."""

    def __init__(self, whole: Gradients, scores: TileScores) -> None:
        """Nothing is added yet."""
        self.whole, self.scores = whole, scores
        self.where = (scores.group.batch, scores.group.heads)
        alone = scores.sink is None and scores.plan.alone
        self.k, self.v = self._columns(whole.k, alone), self._columns(whole.v, alone)
        self.far_k = None if whole.far_k is None else self._columns(whole.far_k, False)

    def _columns(self, into: Tensor, at_once: bool) -> _Columns:
        return _Columns(into[self.where].flatten(0, 1), at_once)

    def add_values(self, by_out: Tensor, weight: Tensor, tile: Tile) -> None:
        """Weightᵀ · by_out to the values."""
        for span, where in tile.laid():
            self.v.add(by_out, weight[..., where], span.columns)

    def add_scores(self, by_score: Tensor, tile: Tile) -> None:
        """Send a tile's gradient of the scores to bias, sink, queries and keys."""
        sink, scores = self.whole.sink, self.scores
        if sink is not None:
            by_sink = scores.apart(by_score)[..., tile.width].sum((0, 2))
            sink.view(-1, scores.plan.repeat)[scores.group.heads] += by_sink
        if self.whole.bias is not None:
            self._add_bias(by_score, tile)
        by_product = scores.by_product(by_score, tile)
        self._add_side(by_product, tile, False, self.whole.q, self.k)
        if self.whole.far_q is not None and self.far_k is not None:
            self._add_side(by_product, tile, True, self.whole.far_q, self.far_k)

    def _add_side(
        self, by_product: Tensor, tile: Tile, far: bool, into: Tensor, sums: _Columns
    ) -> None:
        """To the queries and keys of one regime."""
        lines, pairs = self.scores.lines(tile), []
        for span, where in tile.laid():
            if span.far != far:
                continue
            q, k, columns = self.scores.side(span)
            pairs.append((by_product[..., where], k[:, columns]))
            sums.add(q[:, lines], by_product[..., where], columns)
        target = into[self.where].flatten(0, 1).flatten(1, 2)
        times(pairs, target[:, lines])

    def _add_bias(self, by_score: Tensor, tile: Tile) -> None:
        """Scatter to each head's distances."""
        scores, bias = self.scores, self.whole.bias
        assert bias is not None
        apart, repeat = scores.apart(by_score), scores.plan.repeat
        heads = slice(*(repeat * x for x in (self.where[1].start, self.where[1].stop)))
        for span, where in tile.laid():
            distance = scores.group.seen.distance(tile.rows, span.columns).abs()
            block = ungrouped(apart[..., where])
            if distance.dim() == 2:
                bias[heads].index_add_(1, distance.flatten(), block.sum(0).flatten(1))
                continue
            index = distance[:, 0].expand(block.shape[0], *block.shape[2:])
            bias[heads].index_add_(1, index.flatten(), block.transpose(0, 1).flatten(1))

    def close(self) -> None:
        """Write what has gathered over tiles."""
        for columns in (self.k, self.v, self.far_k):
            if columns is not None:
                columns.close()


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, settings: Mapping[str, Any], seed: int, eye: Eye | None, *tensors: Tensor | None
    ) -> Tensor:
        inputs = AttentionInputs.of(settings, tensors)
        ctx.save_for_backward(*tensors)
        ctx.settings = settings, seed
        wide = inputs.widened()
        return forward_tiles(wide, Plan.of(wide), seed, eye=eye).to(inputs.v.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("the chunked kernel", "backend='reference'")
        settings, seed = ctx.settings
        inputs = AttentionInputs.of(settings, ctx.saved_tensors)
        return (None, None, None, *_gradients(inputs, grads[0], seed))


def _gradients(inputs: AttentionInputs, by_out: Tensor, seed: int) -> tuple[Tensor | None, ...]:
    """The gradients of `inputs.tensors`."""
    wide = inputs.widened()
    return backward_tiles(wide, Plan.of(wide), by_out.to(wide.v.dtype), seed).all(inputs)


def tiled(inputs: AttentionInputs, eye: Eye | None = None) -> Float[Tensor, "b h t e"]:
    """softmax(score) · v by tiles of about 1 MiB of scores; memory O((T + S)·(D + E)) per head.

    A floating mask gets no gradient here: the capability table refuses one that wants it. `eye`
    looks on, and changes nothing. A compiler sees one operator.
    """
    if torch.compiler.is_compiling():
        out: Tensor = _forward_node(*_flat(inputs))[0]
        return out
    seed = draw_seed(inputs)
    attended: Tensor = _Tiled.apply(inputs.settings, seed, eye, *inputs.tensors)  # type: ignore[no-untyped-call]
    return attended


_MASK = ("causal", "query", "key", "aligned", "padding", "mask", "window", "kept")
_DOCUMENTS = ("query_documents", "key_documents")
_SETTINGS = ("window", "dropout", "cap", "near_start")
_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? far_q, Tensor? far_k, Tensor? bias, Tensor? sink, "
    "bool causal, Tensor query, Tensor key, bool aligned, Tensor? padding, Tensor? mask, "
    "SymInt? sliding_window, SymInt kept, Tensor? query_documents, Tensor? key_documents, "
    "SymInt? window, float dropout, float? cap, SymInt near_start"
)
"""What a node takes, in this order: `LEARNED`, then the mask's fields, then the settings."""


def _flat(inputs: AttentionInputs) -> tuple[Any, ...]:
    """The inputs as the arguments of a node."""
    seen = (getattr(inputs.visibility, name) for name in (*_MASK, *_DOCUMENTS))
    return (*inputs.tensors, *seen, *(getattr(inputs, name) for name in _SETTINGS))


def _unflat(*values: Any) -> AttentionInputs:
    """The inputs of the arguments of a node."""
    count, end = len(LEARNED), len(LEARNED) + len(_MASK) + len(_DOCUMENTS)
    seen = AttentionMask(**dict(zip((*_MASK, *_DOCUMENTS), values[count:end], strict=True)))
    learned = dict(zip(LEARNED, values[:count], strict=True))
    return AttentionInputs(
        visibility=seen, **learned, **dict(zip(_SETTINGS, values[end:], strict=True))
    )


@torch.library.custom_op(
    "normattn::tiled", mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor)"
)
def _forward_node(*values: Any) -> tuple[Tensor, Tensor]:
    inputs = _unflat(*values)
    wide, seed = inputs.widened(), draw_seed(inputs)
    out = forward_tiles(wide, Plan.of(wide), seed).to(inputs.v.dtype)
    return out.contiguous(), torch.tensor(seed)


@_forward_node.register_fake
def _(*values: Any) -> tuple[Tensor, Tensor]:
    p = _unflat(*values)
    return p.v.new_empty(*p.q.shape[:3], p.v.shape[-1]), torch.empty((), dtype=torch.int64)


@torch.library.custom_op(
    "normattn::tiled_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor seed, {_SCHEMA}) -> Tensor[]",
)
def _backward_node(grad: Tensor, seed: Tensor, *values: Any) -> list[Tensor]:
    gradients = _gradients(_unflat(*values), grad, int(seed.item()))
    return [x.contiguous() for x in gradients if x is not None]


@_backward_node.register_fake
def _(grad: Tensor, seed: Tensor, *values: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in _unflat(*values).tensors if x is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.tensors = [isinstance(x, Tensor) for x in inputs]
    ctx.save_for_backward(output[1], *(x for x in inputs if isinstance(x, Tensor)))


def _node_gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    seed, *saved = ctx.saved_tensors
    given = iter(saved)
    values = [next(given) if at else x for at, x in zip(ctx.tensors, ctx.others, strict=True)]
    sums = iter(_backward_node(grad, seed, *values))
    learned = [None if x is None else next(sums) for x in values[: len(LEARNED)]]
    return (*learned, *[None] * (len(values) - len(LEARNED)))


_forward_node.register_autograd(_node_gradients, setup_context=_save)

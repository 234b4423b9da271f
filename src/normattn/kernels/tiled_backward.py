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
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.kernels.inputs import LEARNED, AttentionInputs, AttentionMask
from normattn.kernels.numerics import flushing, refuse_second_derivative
from normattn.kernels.stats import Eye, show_tile
from normattn.kernels.tile_scores import (
    TileScores,
    Workspace,
    columns_of,
    grouped,
    product,
    ungrouped,
)
from normattn.kernels.tiled import Group, Plan, Tile

MakeScores = Callable[[AttentionInputs, Plan, Group, Workspace], TileScores]
"""How the scores of a group of heads are made: `TileScores`, or residual ones."""


@flushing
def forward_tiles(
    inputs: AttentionInputs,
    plan: Plan,
    seed: int = 0,
    make: MakeScores = TileScores,
    eye: Eye | None = None,
    with_lse: bool = False,
) -> tuple[Float[Tensor, "b h t e"], Float[Tensor, "*rows"]]:
    """softmax(score) · v in the type of the (wide) inputs, and the log-sum-exp of each row.

    The latter is empty without `with_lse`. `eye` looks at every tile.
    """
    q, v = inputs.q, inputs.v
    out = v.new_empty(*grouped(q, plan.repeat).shape[:-1], v.shape[-1])
    lse = out.new_empty(out.shape[:-1] if with_lse else 0)
    number, space = 0, Workspace()
    for group in plan.groups(q):
        scores = make(inputs, plan, group, space)
        target = out[group.batch, group.heads].flatten(0, 1).flatten(1, 2)
        for tile in group.tiles:
            scores.enter(tile)
            weight = scores.weights(tile, kept=eye is not None or with_lse)
            if with_lse:
                lse[group.batch, group.heads, tile.rows] = scores.log_sum_exp()
            if eye is not None:
                show_tile(eye, scores, tile)
            if inputs.dropout:
                weight[..., : tile.width] *= keep_mask(weight, tile, inputs.dropout, seed + number)
            scores.values(weight, tile, target)
            number += 1
    return ungrouped(out), ungrouped(lse) if with_lse else lse


@flushing
def backward_tiles(
    inputs: AttentionInputs,
    plan: Plan,
    by_out: Float[Tensor, "b h t e"],
    seed: int = 0,
    make: MakeScores = TileScores,
    by_lse: Float[Tensor, "b h t"] | None = None,
    fixed_bias: bool = False,
) -> Gradients:
    """The gradients, the weights computed once more; ∂ lse_i / ∂ s_ij = α_ij.

    A `fixed_bias` gets none.
    """
    sums = Gradients(inputs, plan, fixed_bias)
    by_out = grouped(by_out, plan.repeat)
    by_lse = None if by_lse is None else grouped(by_lse, plan.repeat)
    # Antidiagonals, along which a learned bias gathers, run out of a tile by as many columns.
    learned = sums.bias is not None and plan.backwards
    number, space = 0, Workspace(min(plan.shape.rows, plan.shape.queries) if learned else 0)
    for group in plan.groups(inputs.q):
        scores = make(inputs, plan, group, space)
        part = _GroupGradients(sums, scores)
        grad = by_out[group.batch, group.heads].flatten(0, 1).flatten(1, 2)
        for tile in group.tiles:
            weight = scores.weights(tile, capped=True)
            here = scores.read(grad, tile)
            by_weight = _by_weight(scores, here, tile)
            used = weight
            if inputs.dropout:
                keep = keep_mask(weight, tile, inputs.dropout, seed + number)
                used = weight[..., : tile.width] * keep
                by_weight[..., : tile.width] *= keep
            part.add_values(here, used, tile)
            torch._softmax_backward_data(by_weight, weight, -1, weight.dtype, grad_input=by_weight)
            if by_lse is not None:
                along = scores.rows_of(by_lse, tile)[..., None]
                scores.apart(by_weight).addcmul_(scores.apart(weight), along)
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
    if scores.further:
        result.narrow(2, tile.width, scores.further).zero_()
    for span, where in tile.laid:
        values = scores.v.narrow(1, span.start, span.width)
        product(by_out, values.mT, columns_of(result, where))
    return result


class Gradients:
    """Of q and far_q as (B, G, T, r, D); of k, v, far_k, bias and sink like them."""

    def __init__(self, inputs: AttentionInputs, plan: Plan, fixed_bias: bool) -> None:
        """Room for all of them, whatever the layout of the operands."""
        p = inputs

        def queries(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.new_empty(grouped(x, plan.repeat).shape)

        def like(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.new_empty(x.shape)

        def sums(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.new_zeros(x.shape, dtype=p.q.dtype)

        self.q, self.far_q = queries(p.q), queries(p.far_q)
        self.k, self.v, self.far_k = like(p.k), like(p.v), like(p.far_k)
        self.bias, self.sink = None if fixed_bias else sums(p.bias), sums(p.sink)

    def all(self, inputs: AttentionInputs) -> tuple[Tensor | None, ...]:
        """In the order of `AttentionInputs.tensors`, in their shapes and types."""
        q, far_q = (None if x is None else ungrouped(x) for x in (self.q, self.far_q))
        own = (q, self.k, self.v, far_q, self.far_k, self.bias, self.sink)
        return tuple(
            None if x is None or mine is None else mine.to(x.dtype)
            for x, mine in zip(inputs.tensors, own, strict=True)
        )


class _Columns:
    """The gradient of some heads' keys or values, `into` (n, S, D), column by column."""

    def __init__(self, into: Tensor, sums: Tensor | None) -> None:
        """`sums` (n, D, S) gather over tiles; None where the only product is written at once."""
        self.into, self.sums = into, None if sums is None else sums.zero_()

    def add(self, rows: Tensor, weight: Tensor, start: int) -> None:
        """Add weightᵀ (n, s, c) · rows (n, c, D) to the columns from `start` on."""
        if self.sums is None:
            torch.bmm(weight.mT, rows, out=self.into)
        else:
            self.sums[..., start : start + weight.shape[-1]].baddbmm_(rows.mT, weight)

    def close(self) -> None:
        """Write the sums where they belong."""
        if self.sums is not None:
            self.into.copy_(self.sums.mT)


class _GroupGradients:
    """The sums of one group; `close` writes them where they belong."""

    def __init__(self, whole: Gradients, scores: TileScores) -> None:
        """Nothing is added yet."""
        self.whole, self.scores, self.group = whole, scores, scores.group
        alone = scores.sink is None and scores.plan.alone(scores.group)
        self.k = self._columns("by_k", whole.k, alone)
        self.v = self._columns("by_v", whole.v, alone)
        self.far_k = self._columns("by_far_k", whole.far_k, False)
        self.bias = self.line = None
        if whole.bias is not None:
            # Of the group's heads, and by distance where positions are counted.
            repeat, heads = scores.plan.repeat, scores.group.heads
            self.bias = whole.bias[repeat * heads.start : repeat * heads.stop]
            self.line = None if scores.line is None else torch.zeros_like(scores.line)

    def _of_group(self, x: Tensor) -> Tensor:
        return x[self.group.batch, self.group.heads].flatten(0, 1)

    def _columns(self, name: str, into: Tensor | None, at_once: bool) -> _Columns | None:
        if into is None:
            return None
        part = self._of_group(into)
        n, s, d = part.shape
        return _Columns(part, None if at_once else self.scores.space.take(name, (n, d, s), part))

    def add_values(self, by_out: Tensor, weight: Tensor, tile: Tile) -> None:
        """Weightᵀ · by_out to the values."""
        assert self.v is not None
        for span, where in tile.laid:
            self.v.add(by_out, columns_of(weight, where), span.start)

    def add_scores(self, by_score: Tensor, tile: Tile) -> None:
        """Send a tile's gradient of the scores to bias, sink, queries and keys."""
        sink, scores = self.whole.sink, self.scores
        if sink is not None:
            by_sink = scores.apart(by_score)[..., tile.width].sum((0, 2))
            sink.view(-1, scores.plan.repeat)[self.group.heads] += by_sink
            by_score[..., tile.width] = 0
        if self.bias is not None:
            self._add_bias(by_score, tile, self.bias)
        by_product = scores.by_product(by_score, tile)
        self._add_side(by_product, tile, False, self.whole.q, self.k)
        self._add_side(by_product, tile, True, self.whole.far_q, self.far_k)

    def _add_side(
        self, by_product: Tensor, tile: Tile, far: bool, into: Tensor | None, sums: _Columns | None
    ) -> None:
        """To the queries and keys of one regime."""
        if into is None or sums is None:
            return
        pairs, begin = [], 0 if far else self.scores.plan.shape.near_start
        for span, where in tile.laid:
            if span.far == far:
                q, k = self.scores.side(span)
                part = columns_of(by_product, where)
                pairs.append((part, k.mT))
                sums.add(self.scores.read(q, tile), part, span.start - begin)
        self.scores.write(pairs, self._of_group(into).flatten(1, 2), tile)

    def _add_bias(self, by_score: Tensor, tile: Tile, bias: Tensor) -> None:
        """To each head's distances: where positions are counted they are antidiagonals."""
        scores = self.scores
        apart, backwards = scores.apart(by_score), scores.plan.backwards
        for span, where in tile.laid:
            block = apart[..., where]
            if self.line is not None:
                if not scores.space.margin or len(tile.laid) > 1:
                    block = _padded(block if backwards else block.flip(2))
                by_line, start = _antidiagonals(block), scores.line_offset(tile, span)
                self.line[:, start : start + by_line.shape[1]] += by_line
                continue
            block = ungrouped(block)
            index = scores.group.seen.distance(tile.rows, span.columns)
            index = index.reshape(-1, *block.shape[2:]).expand(len(block), -1, -1).flatten()
            index = index.abs().clamp(max=bias.shape[1] - 1)
            bias.index_add_(1, index, block.transpose(0, 1).flatten(1))

    def close(self) -> None:
        """Write what has gathered over tiles."""
        for columns in (self.k, self.v, self.far_k):
            if columns is not None:
                columns.close()
        if self.line is not None and self.bias is not None:
            shape = self.scores.plan.shape
            most = min(shape.keys, self.bias.shape[1])
            self.bias[:, :most] += self.line[:, : shape.keys].flip(-1)[:, :most]
            if not shape.causal:
                self.bias[:, 1:most] += self.line[:, shape.keys : shape.keys + most - 1]


def _padded(block: Tensor) -> Tensor:
    """A block (b, g, c, r, s) with c − 1 zeros after each row."""
    width = block.shape[-1]
    return torch.nn.functional.pad(block, (0, block.shape[2] - 1))[..., :width]


def _antidiagonals(block: Tensor) -> Tensor:
    """Sums of (b, g, c, r, s) over b and equal row + column: (g·r, s + c − 1).

    In memory c − 1 zeros stand after each row.
    """
    b, g, rows, repeat, width = block.shape
    strides = block.stride()
    # Each row starts one entry earlier, so that an antidiagonal becomes a column.
    steps = strides[0], strides[1], strides[2] - 1, strides[3], 1
    columns = block.as_strided((b, g, rows, repeat, width + rows - 1), steps)
    sums = columns[0].sum(1) if b == 1 else columns.sum((0, 2))
    return sums.flatten(0, 1)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        settings: Mapping[str, Any],
        seed: int,
        with_lse: bool,
        eye: Eye | None,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        inputs = AttentionInputs.of(settings, tensors)
        ctx.save_for_backward(*tensors)
        ctx.settings = settings, seed, with_lse
        out, lse = _forward(inputs, seed, with_lse, eye)
        if not with_lse:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("the chunked kernel", "backend='reference'")
        settings, seed, with_lse = ctx.settings
        inputs = AttentionInputs.of(settings, ctx.saved_tensors)
        by_lse = grads[1] if with_lse else None
        fixed = not ctx.needs_input_grad[4 + LEARNED.index("bias")]
        return (None, None, None, None, *_gradients(inputs, grads[0], by_lse, seed, fixed))


def _forward(
    inputs: AttentionInputs, seed: int, with_lse: bool, eye: Eye | None = None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, computed in float32 or wider."""
    wide = inputs.widened()
    plan = Plan.of(wide, narrow=eye is None)
    out, lse = forward_tiles(wide, plan, seed, eye=eye, with_lse=with_lse)
    return out.to(inputs.v.dtype), lse


def _gradients(
    inputs: AttentionInputs,
    by_out: Tensor,
    by_lse: Tensor | None,
    seed: int,
    fixed_bias: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients of `inputs.tensors`."""
    wide = inputs.widened()
    plan, by_out = Plan.of(wide, narrow=True), by_out.to(wide.v.dtype)
    return backward_tiles(wide, plan, by_out, seed, by_lse=by_lse, fixed_bias=fixed_bias).all(
        inputs
    )


def tiled(inputs: AttentionInputs, eye: Eye | None = None) -> Float[Tensor, "b h t e"]:
    """softmax(score) · v by tiles of about 1 MiB of scores; memory O((T + S)·(D + E)) per head.

    A floating mask gets no gradient here: the capability table refuses one that wants it. `eye`
    looks on, and changes nothing. A compiler sees one operator.
    """
    return tiled_with_more(inputs, eye, False)[0]


def tiled_with_more(
    inputs: AttentionInputs, eye: Eye | None, with_lse: bool
) -> tuple[Float[Tensor, "b h t e"], Float[Tensor, "b h t"] | None]:
    """The same, and the log-sum-exp of each row's scores, to which gradients come as well."""
    if torch.compiler.is_compiling():
        out, lse, _ = _forward_node(*_flat(inputs), with_lse)
    else:
        out, lse = _Tiled.apply(  # type: ignore[no-untyped-call]
            *(inputs.settings, draw_seed(inputs), with_lse, eye, *inputs.tensors)
        )
    return out, lse if with_lse else None


_MASK = ("causal", "query", "key", "aligned", "padding", "mask", "window", "kept")
_DOCUMENTS = ("query_documents", "key_documents")
_SETTINGS = ("window", "dropout", "cap", "near_start")
_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? far_q, Tensor? far_k, Tensor? bias, Tensor? sink, "
    "bool causal, Tensor query, Tensor key, bool aligned, Tensor? padding, Tensor? mask, "
    "SymInt? sliding_window, SymInt kept, Tensor? query_documents, Tensor? key_documents, "
    "SymInt? window, float dropout, float? cap, SymInt near_start, bool with_lse"
)
"""What a node takes, in order: `LEARNED`, the mask's fields, the settings, whether to give LSE."""


def _flat(inputs: AttentionInputs) -> tuple[Any, ...]:
    """The inputs as the arguments of a node."""
    seen = (getattr(inputs.visibility, name) for name in (*_MASK, *_DOCUMENTS))
    return (*inputs.tensors, *seen, *(getattr(inputs, name) for name in _SETTINGS))


def _unflat(*values: Any) -> tuple[AttentionInputs, bool]:
    """The inputs of the arguments of a node, and whether the log-sum-exp is wanted."""
    values, with_lse = values[:-1], values[-1]
    count, end = len(LEARNED), len(LEARNED) + len(_MASK) + len(_DOCUMENTS)
    seen = AttentionMask(**dict(zip((*_MASK, *_DOCUMENTS), values[count:end], strict=True)))
    learned = dict(zip(LEARNED, values[:count], strict=True))
    given = dict(zip(_SETTINGS, values[end:], strict=True))
    return AttentionInputs(visibility=seen, **learned, **given), with_lse


@torch.library.custom_op(
    "normattn::tiled", mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor, Tensor)"
)
def _forward_node(*values: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs, with_lse = _unflat(*values)
    seed = draw_seed(inputs)
    out, lse = _forward(inputs, seed, with_lse)
    return out.contiguous(), lse.contiguous(), torch.tensor(seed)


@_forward_node.register_fake
def _(*values: Any) -> tuple[Tensor, Tensor, Tensor]:
    p, with_lse = _unflat(*values)
    shape = p.q.shape[:3]
    wide = torch.float64 if p.q.dtype == torch.float64 else torch.float32
    lse = p.v.new_empty(shape if with_lse else (0,), dtype=wide)
    return p.v.new_empty(*shape, p.v.shape[-1]), lse, torch.empty((), dtype=torch.int64)


@torch.library.custom_op(
    "normattn::tiled_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor by_lse, Tensor seed, {_SCHEMA}) -> Tensor[]",
)
def _backward_node(grad: Tensor, by_lse: Tensor, seed: Tensor, *values: Any) -> list[Tensor]:
    inputs, with_lse = _unflat(*values)
    gradients = _gradients(inputs, grad, by_lse if with_lse else None, int(seed.item()))
    return [x.contiguous() for x in gradients if x is not None]


@_backward_node.register_fake
def _(grad: Tensor, by_lse: Tensor, seed: Tensor, *values: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in _unflat(*values)[0].tensors if x is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.tensors = [isinstance(x, Tensor) for x in inputs]
    ctx.save_for_backward(output[2], *(x for x in inputs if isinstance(x, Tensor)))


def _node_gradients(ctx: Any, grad: Tensor, by_lse: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    seed, *saved = ctx.saved_tensors
    given = iter(saved)
    values = [next(given) if at else x for at, x in zip(ctx.tensors, ctx.others, strict=True)]
    sums = iter(_backward_node(grad, by_lse, seed, *values))
    learned = [None if x is None else next(sums) for x in values[: len(LEARNED)]]
    return (*learned, *[None] * (len(values) - len(LEARNED)))


_forward_node.register_autograd(_node_gradients, setup_context=_save)

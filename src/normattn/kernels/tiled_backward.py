"""Attention by tiles with its backward, and as one node of a compiled graph.

The backward computes the weights of a tile once more instead of keeping them. Gradients of keys and
values gather over tiles transposed, (n, D, S): the products gradᵀ · weights then read the weights
row by row. Where one tile holds all columns nothing gathers, and weightsᵀ · grad is written in its
place at once, 1.6 to 9 times faster than by way of sums. Half-precision inputs are widened to
float32: no score is rounded.

Legend: B batch, H query heads, G key heads, r query heads per key head, T queries, S keys, D score
size, E value size, R distances; n = b·g key heads of a group, c token rows of a tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.kernels.inputs import LEARNED, AttentionInputs, AttentionMask
from normattn.kernels.numerics import at_least_float32, flushing, refuse_second_derivative
from normattn.kernels.stats import Recorder, record_tile
from normattn.kernels.tile_scores import (
    MakeScores,
    TileScores,
    grouped,
    score_groups,
    ungrouped,
)
from normattn.kernels.tiled import Plan, Tile

Gradients = tuple[Tensor | None, ...]
"""Of the tensors of some inputs, in the order of `LEARNED`."""


@flushing
def forward_tiles(
    given: AttentionInputs,
    seed: int = 0,
    make: MakeScores = TileScores,
    recorder: Recorder | None = None,
    with_lse: bool = False,
) -> tuple[Float[Tensor, "b h t e"], Float[Tensor, "*rows"]]:
    """softmax(score) · v, and the log-sum-exp of each row (empty without `with_lse`)."""
    inputs = given.widened()
    # A dropout mask follows the tile's width, which has to be the same backward.
    narrow = recorder is None and make is TileScores and not inputs.dropout
    plan = Plan.of(inputs, narrow)
    out = inputs.v.new_empty(*grouped(inputs.q, plan.repeat).shape[:-1], inputs.v.shape[-1])
    lse = out.new_empty(out.shape[:-1] if with_lse else 0)
    number = 0
    for scores in score_groups(inputs, plan, make):
        at = scores.group.batch, scores.group.heads
        target = out[at].flatten(0, 1).flatten(1, 2)
        for tile in scores.group.tiles:
            scores.enter(tile)
            weight = scores.weights(tile, keep=recorder is not None or with_lse)
            if with_lse:
                lse[*at, tile.rows] = scores.log_sum_exp()
            if recorder is not None:
                record_tile(recorder, scores, tile)
            if inputs.dropout:
                weight[..., : tile.width] *= keep_mask(weight, tile, inputs.dropout, seed + number)
            scores.values(weight, tile, target)
            number += 1
    return ungrouped(out).to(given.v.dtype), ungrouped(lse) if with_lse else lse


@flushing
def backward_tiles(
    given: AttentionInputs,
    by_out: Float[Tensor, "b h t e"],
    seed: int = 0,
    make: MakeScores = TileScores,
    by_lse: Float[Tensor, "b h t"] | None = None,
    fixed_bias: bool = False,
) -> Gradients:
    """The gradients, the weights computed once more; ∂ lse_i / ∂ s_ij = α_ij.

    A `fixed_bias` gets none.
    """
    inputs = given.widened()
    plan = Plan.of(inputs, narrow=make is TileScores and not inputs.dropout)
    whole = _empty_gradients(inputs, plan.repeat, fixed_bias)
    by_out = grouped(by_out.to(inputs.v.dtype), plan.repeat)
    by_lse = None if by_lse is None else grouped(by_lse, plan.repeat)
    # Antidiagonals, along which a learned bias gathers, run out of a tile by as many columns.
    learned = "bias" in whole and plan.backwards
    margin = min(plan.shape.rows, plan.shape.queries) if learned else 0
    number = 0
    for scores in score_groups(inputs, plan, make, margin):
        part = _GroupGradients(whole, scores)
        by_rows = by_out[scores.group.batch, scores.group.heads].flatten(0, 1).flatten(1, 2)
        for tile in scores.group.tiles:
            weight, by_row = scores.weights(tile, capped=True), scores.read(by_rows, tile)
            by_score, used = scores.by_weight(by_row, tile), weight
            if inputs.dropout:
                keep = keep_mask(weight, tile, inputs.dropout, seed + number)
                used = weight[..., : tile.width] * keep
                by_score[..., : tile.width] *= keep
            part.add_values(by_row, used, tile)
            torch._softmax_backward_data(by_score, weight, -1, weight.dtype, grad_input=by_score)
            if by_lse is not None:
                along = scores.rows_of(by_lse, tile)[..., None]
                scores.by_head(by_score).addcmul_(scores.by_head(weight), along)
            part.add_scores(by_score, tile)
            scores.leave(tile)
            number += 1
        part.close()
    sums = {name: ungrouped(x) if name in ("q", "far_q") else x for name, x in whole.items()}
    like = dict(zip(LEARNED, given.tensors, strict=True))
    return tuple(sums[name].to(like[name]) if name in sums else None for name in LEARNED)


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


def _empty_gradients(inputs: AttentionInputs, repeat: int, fixed_bias: bool) -> dict[str, Tensor]:
    """Room for the gradients by name: those of q and far_q as (B, G, T, r, D), sums as 0."""
    made = {}
    for name, x in zip(LEARNED, inputs.tensors, strict=True):
        if x is None or (name == "bias" and fixed_bias):
            continue
        if name in ("bias", "sink"):
            made[name] = x.new_zeros(x.shape, dtype=inputs.q.dtype)
        else:
            shape = grouped(x, repeat).shape if name in ("q", "far_q") else x.shape
            made[name] = x.new_empty(shape)
    return made


class _GroupGradients:
    """The gradients of one group of heads; `close` writes what has gathered where it belongs."""

    def __init__(self, whole: Mapping[str, Tensor], scores: TileScores) -> None:
        """Nothing is added yet."""
        self.whole, self.scores, self.line = whole, scores, None
        # Of each operand its gradient (n, S, D), and what gathers over tiles, (n, D, S): None where
        # the only product is written at once.
        self.columns: dict[str, tuple[Tensor, Tensor | None]] = {}
        single = scores.sink is None and _single_span(scores)
        for name in ("k", "v", "far_k"):
            if name in whole:
                into = self._of_group(whole[name])
                n, s, d = into.shape
                gathers = not single or name == "far_k"
                sums = scores.space.take(f"by_{name}", (n, d, s), into) if gathers else None
                self.columns[name] = into, None if sums is None else sums.zero_()
        if "bias" in whole and scores.line is not None:
            self.line = torch.zeros_like(scores.line)

    def _of_group(self, x: Tensor) -> Tensor:
        return x[self.scores.group.batch, self.scores.group.heads].flatten(0, 1)

    def _add_columns(self, name: str, weight: Tensor, rows: Tensor, start: int) -> None:
        """Weightᵀ (n, s, c) · rows (n, c, D) to the columns from `start` on."""
        into, sums = self.columns[name]
        if sums is None:
            torch.bmm(weight.mT, rows, out=into)
        else:
            sums[..., start : start + weight.shape[-1]].baddbmm_(rows.mT, weight)

    def add_values(self, by_out: Tensor, weight: Tensor, tile: Tile) -> None:
        """Weightᵀ · by_out to the values."""
        for span, where in tile.placed:
            self._add_columns("v", weight[..., where], by_out, span.start)

    def add_scores(self, by_score: Tensor, tile: Tile) -> None:
        """Send a tile's gradient of the scores to bias, sink, queries and keys."""
        scores, whole = self.scores, self.whole
        if "sink" in whole:
            by_sink = scores.by_head(by_score)[..., tile.width].sum((0, 2))
            whole["sink"].view(-1, scores.plan.repeat)[scores.group.heads] += by_sink
            by_score[..., tile.width] = 0
        if "bias" in whole:
            self._add_bias(by_score, tile)
        by_product = scores.by_product(by_score, tile)
        for far in (False, True) if "far_q" in whole else (False,):
            pairs, (of_q, of_k) = [], ("far_q", "far_k") if far else ("q", "k")
            begin = 0 if far else scores.plan.shape.near_start
            for span, where in tile.placed:
                if span.far == far:
                    (q, k), part = scores.side(span), by_product[..., where]
                    pairs.append((part, k.mT))
                    self._add_columns(of_k, part, scores.read(q, tile), span.start - begin)
            scores.write(pairs, self._of_group(whole[of_q]).flatten(1, 2), tile)

    def _bias(self) -> Tensor:
        """The gradient of the bias of the group's heads, (g·r, R)."""
        repeat, heads = self.scores.plan.repeat, self.scores.group.heads
        return self.whole["bias"][repeat * heads.start : repeat * heads.stop]

    def _add_bias(self, by_score: Tensor, tile: Tile) -> None:
        """To each head's distances: where positions are counted they are antidiagonals."""
        scores, backwards = self.scores, self.scores.plan.backwards
        for span, where in tile.placed:
            block = scores.by_head(by_score)[..., where]
            if self.line is not None:
                if not scores.space.margin or len(tile.placed) > 1:
                    block = _padded(block if backwards else block.flip(2))
                by_line, start = _antidiagonals(block), scores.line_offset(tile, span)
                self.line[:, start : start + by_line.shape[1]] += by_line
                continue
            block, bias = ungrouped(block), self._bias()
            index = scores.group.mask.distance(tile.rows, span.columns)
            index = index.reshape(-1, *block.shape[2:]).expand(len(block), -1, -1).flatten()
            index = index.abs().clamp(max=bias.shape[1] - 1)
            bias.index_add_(1, index, block.transpose(0, 1).flatten(1))

    def close(self) -> None:
        """Write what has gathered over tiles."""
        for into, sums in self.columns.values():
            if sums is not None:
                into.copy_(sums.mT)
        if self.line is not None:
            shape, bias = self.scores.plan.shape, self._bias()
            most = min(shape.keys, bias.shape[1])
            bias[:, :most] += self.line[:, : shape.keys].flip(-1)[:, :most]
            if not shape.causal:
                bias[:, 1:most] += self.line[:, shape.keys : shape.keys + most - 1]


def _single_span(scores: TileScores) -> bool:
    """Whether one near span of one tile holds every column."""
    spans = [(span.far, span.columns) for tile in scores.group.tiles for span in tile.spans]
    shape = scores.plan.shape
    return spans == [(False, slice(0, shape.keys))] and shape.near_start == 0


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
        recorder: Recorder | None,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        inputs = AttentionInputs.of(settings, tensors)
        ctx.save_for_backward(*tensors)
        ctx.settings = settings, seed, with_lse
        out, lse = forward_tiles(inputs, seed, recorder=recorder, with_lse=with_lse)
        if not with_lse:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        refuse_second_derivative("the chunked kernel", "backend='reference'")
        settings, seed, with_lse = ctx.settings
        inputs = AttentionInputs.of(settings, ctx.saved_tensors)
        by_lse = grads[1] if with_lse else None
        fixed = not ctx.needs_input_grad[4 + LEARNED.index("bias")]
        found = backward_tiles(inputs, grads[0], seed, by_lse=by_lse, fixed_bias=fixed)
        return None, None, None, None, *found


def tiled(
    inputs: AttentionInputs, recorder: Recorder | None = None, with_lse: bool = False
) -> tuple[Float[Tensor, "b h t e"], Float[Tensor, "b h t"] | None]:
    """softmax(score) · v by tiles of about 1 MiB of scores, and each row's log-sum-exp.

    Memory is O((T + S)·(D + E)) per head; gradients come by the log-sum-exp as well. A floating
    mask gets no gradient: the capability table refuses one that wants it. `recorder` takes
    statistics, and changes nothing. A compiler sees one operator.
    """
    if torch.compiler.is_compiling():
        out, lse, _ = _forward_node(*_arguments(inputs), with_lse)
    else:
        out, lse = _Tiled.apply(  # type: ignore[no-untyped-call]
            *(inputs.settings, draw_seed(inputs), with_lse, recorder, *inputs.tensors)
        )
    return out, lse if with_lse else None


# What a node takes, in order: `LEARNED`, the fields of a mask, settings, whether to give the LSE.
_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? far_q, Tensor? far_k, Tensor? bias, Tensor? sink, "
    "bool causal, Tensor query, Tensor key, bool aligned, Tensor? padding, Tensor? attn_mask, "
    "SymInt? sliding_window, SymInt sink_tokens, Tensor? query_documents, Tensor? key_documents, "
    "SymInt? window, float dropout, float? cap, SymInt near_start, bool with_lse"
)
_MASK = tuple(field.name for field in fields(AttentionMask))
_SETTINGS = ("window", "dropout", "cap", "near_start")


def _arguments(inputs: AttentionInputs) -> tuple[Any, ...]:
    """The inputs as the arguments of a node."""
    mask = (getattr(inputs.mask, name) for name in _MASK)
    return (*inputs.tensors, *mask, *(getattr(inputs, name) for name in _SETTINGS))


def _inputs_of(arguments: Sequence[Any]) -> AttentionInputs:
    """The inputs of the arguments of a node."""
    count, end = len(LEARNED), len(LEARNED) + len(_MASK)
    settings: dict[str, Any] = dict(zip(_SETTINGS, arguments[end:-1], strict=True))
    settings["mask"] = AttentionMask(*arguments[count:end])
    return AttentionInputs.of(settings, arguments[:count])


@torch.library.custom_op(
    "normattn::tiled", mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor, Tensor)"
)
def _forward_node(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs = _inputs_of(arguments)
    seed = draw_seed(inputs)
    out, lse = forward_tiles(inputs, seed, with_lse=arguments[-1])
    return out.contiguous(), lse.contiguous(), torch.tensor(seed)


@_forward_node.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    p, shape = _inputs_of(arguments), arguments[0].shape[:3]
    wide = at_least_float32(p.q.dtype)
    lse = p.v.new_empty(shape if arguments[-1] else (0,), dtype=wide)
    return p.v.new_empty(*shape, p.v.shape[-1]), lse, torch.empty((), dtype=torch.int64)


@torch.library.custom_op(
    "normattn::tiled_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor by_lse, Tensor seed, {_SCHEMA}) -> Tensor[]",
)
def _backward_node(grad: Tensor, by_lse: Tensor, seed: Tensor, *arguments: Any) -> list[Tensor]:
    inputs, sums = _inputs_of(arguments), by_lse if arguments[-1] else None
    found = backward_tiles(inputs, grad, int(seed.item()), by_lse=sums)
    return [x.contiguous() for x in found if x is not None]


@_backward_node.register_fake
def _(grad: Tensor, by_lse: Tensor, seed: Tensor, *arguments: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in arguments[: len(LEARNED)] if x is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.tensors = [isinstance(x, Tensor) for x in inputs]
    ctx.save_for_backward(output[2], *(x for x in inputs if isinstance(x, Tensor)))


def _node_gradients(ctx: Any, grad: Tensor, by_lse: Tensor, _: Tensor) -> Gradients:
    seed, *saved = ctx.saved_tensors
    given = iter(saved)
    values = [next(given) if at else x for at, x in zip(ctx.tensors, ctx.others, strict=True)]
    sums = iter(_backward_node(grad, by_lse, seed, *values))
    learned = [None if x is None else next(sums) for x in values[: len(LEARNED)]]
    return (*learned, *[None] * (len(values) - len(LEARNED)))


_forward_node.register_autograd(_node_gradients, setup_context=_save)

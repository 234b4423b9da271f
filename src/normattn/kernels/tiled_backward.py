"""Attention by tiles with its backward, as an autograd function and as an operator for compilers.

The backward recomputes the weights of each tile. Gradients of keys and values are summed over tiles
in transposed form, (n, D, S), because gradᵀ · weights reads the weights row by row. If one tile
holds all columns, weightsᵀ · grad is written directly, 1.6 to 9 times faster than through sums.
Half-precision inputs are computed in float32, so no score is rounded.

Legend: B batch, H query heads, G key heads, r query heads per key head, T queries, S keys, D score
size, E value size, R distances; n = b·g key heads of a group, c query rows of a tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.kernels.inputs import TENSOR_FIELDS, AttentionInputs, AttentionMask
from normattn.kernels.numerics import at_least_float32, flushing, refuse_second_derivative
from normattn.kernels.stats import Recorder, record_tile
from normattn.kernels.tile_scores import (
    MakeScores,
    TileScores,
    group_heads,
    score_groups,
    ungroup_heads,
)
from normattn.kernels.tiled import Tile, TilePlan

Gradients = tuple[Tensor | None, ...]
"""The gradients of `AttentionInputs.tensors`, in the order of `TENSOR_FIELDS`."""


@flushing
def forward_tiles(
    inputs: AttentionInputs,
    seed: int = 0,
    make: MakeScores = TileScores,
    recorder: Recorder | None = None,
    with_lse: bool = False,
) -> tuple[Float[Tensor, "b h t e"], Float[Tensor, "*rows"]]:
    """softmax(score) · v, and the log-sum-exp of each row (empty without `with_lse`)."""
    dtype, inputs = inputs.v.dtype, inputs.upcast()
    # Dropout masks have the width of a tile, which must be the same in the backward.
    limit_reach = recorder is None and make is TileScores and not inputs.dropout
    plan = TilePlan.of(inputs, limit_reach)
    out = inputs.v.new_empty(*group_heads(inputs.q, plan.repeat).shape[:-1], inputs.v.shape[-1])
    lse = out.new_empty(out.shape[:-1] if with_lse else 0)
    number = 0
    for scores in score_groups(inputs, plan, make):
        index = scores.group.batch, scores.group.heads
        group_out = out[index].flatten(0, 1).flatten(1, 2)
        for tile in scores.group.tiles:
            scores.before_forward(tile)
            weight = scores.weights(tile, keep=recorder is not None or with_lse)
            if with_lse:
                lse[*index, tile.rows] = scores.log_sum_exp()
            if recorder is not None:
                record_tile(recorder, scores, tile)
            if inputs.dropout:
                weight[..., : tile.width] *= keep_mask(weight, tile, inputs.dropout, seed + number)
            scores.multiply_values(weight, tile, group_out)
            number += 1
    return ungroup_heads(out).to(dtype), ungroup_heads(lse) if with_lse else lse


@flushing
def backward_tiles(
    inputs: AttentionInputs,
    grad_out: Float[Tensor, "b h t e"],
    seed: int = 0,
    make: MakeScores = TileScores,
    grad_lse: Float[Tensor, "b h t"] | None = None,
    fixed_bias: bool = False,
) -> Gradients:
    """The gradients of the inputs' tensors, except a `fixed_bias`; ∂ lse_i / ∂ s_ij = α_ij."""
    dtypes, inputs = [None if x is None else x.dtype for x in inputs.tensors], inputs.upcast()
    plan = TilePlan.of(inputs, limit_reach=make is TileScores and not inputs.dropout)
    grads = _empty_gradients(inputs, plan.repeat, fixed_bias)
    grad_out = group_heads(grad_out.to(inputs.v.dtype), plan.repeat)
    grad_lse = None if grad_lse is None else group_heads(grad_lse, plan.repeat)
    # A learned bias's gradient sums antidiagonals, which leave a tile by up to this many columns.
    learned_bias = "bias" in grads and plan.last_row_first
    margin = min(plan.shape.rows, plan.shape.queries) if learned_bias else 0
    number = 0
    for scores in score_groups(inputs, plan, make, margin):
        group_grads = _GroupGradients(grads, scores)
        grad_rows = grad_out[scores.group.batch, scores.group.heads].flatten(0, 1).flatten(1, 2)
        for tile in scores.group.tiles:
            weight, grad_row = scores.weights(tile, capped=True), scores.load_rows(grad_rows, tile)
            grad_score, dropped = scores.grad_weights(grad_row, tile), weight
            if inputs.dropout:
                keep = keep_mask(weight, tile, inputs.dropout, seed + number)
                dropped = weight[..., : tile.width] * keep
                grad_score[..., : tile.width] *= keep
            for span, columns in tile.span_columns:
                group_grads.add_to_keys("v", dropped[..., columns], grad_row, span.start)
            torch._softmax_backward_data(
                grad_score, weight, -1, weight.dtype, grad_input=grad_score
            )
            if grad_lse is not None:
                row_grad = scores.load_grouped_rows(grad_lse, tile)[..., None]
                scores.split_heads(grad_score).addcmul_(scores.split_heads(weight), row_grad)
            group_grads.add_scores(grad_score, tile)
            scores.after_backward(tile)
            number += 1
        group_grads.close()
    for name in {"q", "far_q"} & grads.keys():
        grads[name] = ungroup_heads(grads[name])
    by_field = zip(TENSOR_FIELDS, dtypes, strict=True)
    return tuple(grads[name].to(dtype) if name in grads else None for name, dtype in by_field)


def keep_mask(weight: Tensor, tile: Tile, rate: float, seed: int) -> Tensor:
    """The dropout mask of a tile, divided by 1 − rate; the same in forward and backward."""
    generator = torch.Generator(device=weight.device)
    generator.manual_seed(seed)
    shape = (*weight.shape[:-1], tile.width)
    keep = torch.rand(shape, generator=generator, device=weight.device) >= rate
    return keep.to(weight.dtype) / (1 - rate)


def draw_seed(inputs: AttentionInputs) -> int:
    """Draw a seed for dropout; 0 without dropout."""
    return int(torch.randint(2**62, ()).item()) if inputs.dropout else 0


def _empty_gradients(inputs: AttentionInputs, repeat: int, fixed_bias: bool) -> dict[str, Tensor]:
    """Buffers of the gradients by field: q and far_q as (B, G, T, r, D); bias and sink are 0."""
    grads: dict[str, Tensor] = {}
    for name, x in zip(TENSOR_FIELDS, inputs.tensors, strict=True):
        if name in ("bias", "sink") and x is not None and not (fixed_bias and name == "bias"):
            grads[name] = x.new_zeros(x.shape, dtype=inputs.q.dtype)
        elif name not in ("bias", "sink") and x is not None:
            grouped = name in ("q", "far_q")
            grads[name] = x.new_empty(group_heads(x, repeat).shape if grouped else x.shape)
    return grads


class _GroupGradients:
    """Adds up the gradients of one group of heads; `close` writes the sums to `grads`."""

    def __init__(self, grads: Mapping[str, Tensor], scores: TileScores) -> None:
        self.grads, self.scores = grads, scores
        self.bias_line: Tensor | None = None
        # The gradient (n, S, D) of keys and values, and its sums over tiles (n, D, S), if needed.
        self.key_grads: dict[str, tuple[Tensor, Tensor | None]] = {}
        spans = [(span.far, span.columns) for tile in scores.group.tiles for span in tile.spans]
        one_span = spans == [(False, slice(0, scores.plan.shape.keys))]
        single = one_span and scores.plan.shape.near_start == 0 and scores.sink is None
        for name in ("k", "v", "far_k"):
            if name in grads:
                grad, sums = self._select_group(grads[name]), None
                if not single or name == "far_k":
                    n, s, d = grad.shape
                    sums = scores.workspace.take(f"grad_{name}", (n, d, s), grad).zero_()
                self.key_grads[name] = grad, sums
        if "bias" in grads:
            repeat, heads = scores.plan.repeat, scores.group.heads
            self.bias_grad = grads["bias"][repeat * heads.start : repeat * heads.stop]
            line = scores.bias_line
            self.bias_line = None if line is None else torch.zeros_like(line)

    def _select_group(self, x: Tensor) -> Tensor:
        return x[self.scores.group.batch, self.scores.group.heads].flatten(0, 1)

    def add_to_keys(self, name: str, weight: Tensor, rows: Tensor, start: int) -> None:
        """Add weightᵀ (n, s, c) · rows (n, c, D) to the keys or values from `start` on."""
        grad, sums = self.key_grads[name]
        if sums is None:
            torch.bmm(weight.mT, rows, out=grad)
        else:
            sums[..., start : start + weight.shape[-1]].baddbmm_(rows.mT, weight)

    def add_scores(self, grad_score: Tensor, tile: Tile) -> None:
        """Add the gradient of a tile's scores to those of sink, bias, queries and keys."""
        scores, grads = self.scores, self.grads
        if "sink" in grads:
            grad_sink = scores.split_heads(grad_score)[..., tile.width].sum((0, 2))
            grads["sink"].view(-1, scores.plan.repeat)[scores.group.heads] += grad_sink
            grad_score[..., tile.width] = 0
        if "bias" in grads:
            self._add_bias(grad_score, tile)
        grad_products = scores.grad_products(grad_score, tile)
        for far in (False, True) if "far_q" in grads else (False,):
            pairs, (q_name, k_name) = [], ("far_q", "far_k") if far else ("q", "k")
            offset = 0 if far else scores.plan.shape.near_start
            for span, columns in tile.span_columns:
                if span.far == far:
                    (q, k), grad = scores.operands(span), grad_products[..., columns]
                    pairs.append((grad, k.mT))
                    self.add_to_keys(k_name, grad, scores.load_rows(q, tile), span.start - offset)
            scores.store_products(pairs, self._select_group(grads[q_name]).flatten(1, 2), tile)

    def _add_bias(self, grad_score: Tensor, tile: Tile) -> None:
        """Add to each head's distances, which are antidiagonals if positions are aligned."""
        scores, last_row_first = self.scores, self.scores.plan.last_row_first
        for span, columns in tile.span_columns:
            block = scores.split_heads(grad_score)[..., columns]
            if self.bias_line is not None:
                if not scores.workspace.margin or len(tile.span_columns) > 1:
                    # c − 1 zeros after each row, as the margin gives.
                    block = block if last_row_first else block.flip(2)
                    padded = torch.nn.functional.pad(block, (0, block.shape[2] - 1))
                    block = padded[..., : block.shape[-1]]
                grad_line, start = _antidiagonals(block), scores.line_offset(tile, span)
                self.bias_line[:, start : start + grad_line.shape[1]] += grad_line
                continue
            block = ungroup_heads(block)
            index = scores.group.mask.distance(tile.rows, span.columns)
            index = index.reshape(-1, *block.shape[2:]).expand(len(block), -1, -1).flatten()
            index = index.abs().clamp(max=self.bias_grad.shape[1] - 1)
            self.bias_grad.index_add_(1, index, block.transpose(0, 1).flatten(1))

    def close(self) -> None:
        for grad, sums in self.key_grads.values():
            if sums is not None:
                grad.copy_(sums.mT)
        if self.bias_line is not None:
            keys, bias_grad = self.scores.plan.shape.keys, self.bias_grad
            count = min(keys, bias_grad.shape[1])
            bias_grad[:, :count] += self.bias_line[:, :keys].flip(-1)[:, :count]
            if not self.scores.plan.shape.causal:
                bias_grad[:, 1:count] += self.bias_line[:, keys : keys + count - 1]


def _antidiagonals(block: Tensor) -> Tensor:
    """Sums (g·r, s + c − 1) of (b, g, c, r, s) over b and equal row + column."""
    b, g, rows, repeat, width = block.shape
    strides = block.stride()
    # Each row starts one entry earlier than the last, so antidiagonals become columns. The memory
    # holds c − 1 zeros after each row.
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
        grad_lse = grads[1] if with_lse else None
        fixed = not ctx.needs_input_grad[4 + TENSOR_FIELDS.index("bias")]
        input_grads = backward_tiles(inputs, grads[0], seed, grad_lse=grad_lse, fixed_bias=fixed)
        return None, None, None, None, *input_grads


def tiled(
    inputs: AttentionInputs, recorder: Recorder | None = None, with_lse: bool = False
) -> tuple[Float[Tensor, "b h t e"], Float[Tensor, "b h t"] | None]:
    """softmax(score) · v by tiles of about 1 MiB of scores, and each row's log-sum-exp.

    Memory is O((T + S)·(D + E)) per head. Both results have gradients; a floating mask gets none,
    so `dispatch` refuses a learned one. `recorder` collects statistics without changing the
    result. A compiler sees one operator.
    """
    if torch.compiler.is_compiling():
        mask = (getattr(inputs.mask, name) for name in _MASK_FIELDS)
        settings = (getattr(inputs, name) for name in _SETTING_FIELDS)
        out, lse, _ = _forward_op(*inputs.tensors, *mask, *settings, with_lse)
    else:
        out, lse = _Tiled.apply(  # type: ignore[no-untyped-call]
            *(inputs.settings, draw_seed(inputs), with_lse, recorder, *inputs.tensors)
        )
    return out, lse if with_lse else None


# The operators' arguments: `TENSOR_FIELDS`, the fields of a mask, settings, and `with_lse`.
_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? far_q, Tensor? far_k, Tensor? bias, Tensor? sink, "
    "bool causal, Tensor query, Tensor key, bool aligned, Tensor? padding, Tensor? attn_mask, "
    "SymInt? window, SymInt sink_tokens, Tensor? query_documents, Tensor? key_documents, "
    "SymInt? far_from, float dropout, float? cap, SymInt near_start, bool with_lse"
)
_MASK_FIELDS = tuple(field.name for field in fields(AttentionMask))
_SETTING_FIELDS = ("far_from", "dropout", "cap", "near_start")


def _op_inputs(arguments: Sequence[Any]) -> AttentionInputs:
    """Rebuild the inputs from the operators' arguments."""
    start, end = len(TENSOR_FIELDS), len(TENSOR_FIELDS) + len(_MASK_FIELDS)
    settings: dict[str, Any] = dict(zip(_SETTING_FIELDS, arguments[end:-1], strict=True))
    settings["mask"] = AttentionMask(*arguments[start:end])
    return AttentionInputs.of(settings, arguments[:start])


@torch.library.custom_op(
    "normattn::tiled", mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor, Tensor)"
)
def _forward_op(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs = _op_inputs(arguments)
    seed = draw_seed(inputs)
    out, lse = forward_tiles(inputs, seed, with_lse=arguments[-1])
    return out.contiguous(), lse.contiguous(), torch.tensor(seed)


@_forward_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs, shape = _op_inputs(arguments), arguments[0].shape[:3]
    v, dtype = inputs.v, at_least_float32(inputs.q.dtype)
    lse = v.new_empty(shape if arguments[-1] else (0,), dtype=dtype)
    return v.new_empty(*shape, v.shape[-1]), lse, torch.empty((), dtype=torch.int64)


@torch.library.custom_op(
    "normattn::tiled_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor grad_lse, Tensor seed, {_SCHEMA}) -> Tensor[]",
)
def _backward_op(grad: Tensor, grad_lse: Tensor, seed: Tensor, *arguments: Any) -> list[Tensor]:
    inputs, lse_grad = _op_inputs(arguments), grad_lse if arguments[-1] else None
    grads = backward_tiles(inputs, grad, int(seed.item()), grad_lse=lse_grad)
    return [x.contiguous() for x in grads if x is not None]


@_backward_op.register_fake
def _(grad: Tensor, grad_lse: Tensor, seed: Tensor, *arguments: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in arguments[: len(TENSOR_FIELDS)] if x is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.constants = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.is_tensor = [isinstance(x, Tensor) for x in inputs]
    ctx.save_for_backward(output[2], *(x for x in inputs if isinstance(x, Tensor)))


def _op_gradients(ctx: Any, grad: Tensor, grad_lse: Tensor, _: Tensor) -> Gradients:
    seed, *tensors = ctx.saved_tensors
    saved = iter(tensors)
    arguments = [
        next(saved) if is_tensor else constant
        for is_tensor, constant in zip(ctx.is_tensor, ctx.constants, strict=True)
    ]
    grads = iter(_backward_op(grad, grad_lse, seed, *arguments))
    input_grads = [None if x is None else next(grads) for x in arguments[: len(TENSOR_FIELDS)]]
    return (*input_grads, *[None] * (len(arguments) - len(TENSOR_FIELDS)))


_forward_op.register_autograd(_op_gradients, setup_context=_save)

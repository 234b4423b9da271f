"""Residual scores (RealFormer): every layer attends with the sum of its scores and those below.

The sum is held in one of three ways, which the lowest layer's kernel decides for all:

- residual: one buffer of scores for the whole stack. Going up, layer n adds its products to it in
  place, tile by tile, and attends with softmax of the sums. Coming down, its backward finds s_n in
  the buffer, adds its gradient to a second buffer (that of s_m is the sum of those of all layers
  from m on), and takes its products away again. So a stack of any depth holds one or two numbers
  per pair, where a stored sum holds several for each layer, and computes no more products than
  attention without residuals. What undoing rounds off is about the last digit of a score.
- concatenated: ⟨[q_1 … q_n], [k_1 … k_n]⟩ = Σ_m ⟨q_m, k_m⟩, exactly. Nothing per pair is kept and
  any kernel serves it, but layer n multiplies n·D features.
- reference: one tensor known to autograd.

In the buffer, layers are chained by an empty tensor, so that backward meets them from the top down.
Undoing happens once, and for all layers. A second backward, a second derivative, and a backward
that leaves layers above out (a loss at an early exit) are refused.

Legend: B batch, H query heads, G key heads, r query heads per key head, T queries, S keys, D score
size, E value size; n key heads of a group, c token rows of a tile, W its columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels.inputs import AttentionInputs, AttentionMask
from normattn.kernels.numerics import refuse_second_derivative
from normattn.kernels.stats import Recorder
from normattn.kernels.tile_scores import TileScores, Workspace
from normattn.kernels.tiled import Group, Plan, Tile, hide_edges
from normattn.kernels.tiled_backward import Gradients, backward_tiles, draw_seed, forward_tiles

Tiles = dict[tuple[int, int, int], Tensor]


class ScoreBuffer:
    """The sums of a stack and their gradients, and how many layers are in them.

    A number for each pair, in float32 or wider, each tile's (n, c·r, W) by itself: causal rows hold
    the keys up to their tile's last row, about half of T × S, and pieces of that size are what an
    allocator keeps from step to step.
    """

    def __init__(self, mask: AttentionMask) -> None:
        """`mask` says which pairs all layers see."""
        self.mask, self.layers = mask, 0
        self.sums: Tiles = {}
        self.gradients: Tiles = {}

    def tile(self, of: Tiles, scores: TileScores, tile: Tile) -> Tensor:
        """The numbers (n, c·r, W) of a tile in `sums` or `gradients`, uninitialised at first."""
        group, lines = scores.group, tile.count * scores.plan.repeat
        name = group.batch.start, group.heads.start, tile.rows.start
        if name not in of:
            of[name] = scores.q.new_empty(scores.q.shape[0], lines, tile.width)
        return of[name]

    def add(self, number: int, mask: AttentionMask) -> None:
        """Layer `number`, from 1, joins. Raises `InputError` where it does not fit."""
        if self.layers != number - 1:
            raise InputError(
                "these residual scores were already used in a backward pass: each forward pass "
                "needs new `ResidualScores`"
            )
        for name in ("causal", "window", "sink_tokens", "aligned"):
            if getattr(self.mask, name) != getattr(mask, name):
                raise InputError(
                    "all layers that share residual scores must see the same pairs, but "
                    "causality, the sliding window or positions differ between them"
                )
        self.layers = number

    def undone(self, number: int) -> None:
        """Layer `number` is no longer in the buffer."""
        self.layers = number - 1
        if number == 1:
            self.sums.clear()
            self.gradients.clear()


class _Layer(NamedTuple):
    """A layer of a stack: its number, from 1, and what multiplies the sum.

    `highest`: in this backward no layer above has written to the gradients.
    """

    number: int
    share: float
    highest: bool = False


class ResidualTileScores(TileScores):
    """The scores are the sums in a buffer, to which a forward adds its products."""

    def __init__(
        self,
        buffer: ScoreBuffer,
        layer: _Layer,
        inputs: AttentionInputs,
        plan: Plan,
        group: Group,
        space: Workspace,
    ) -> None:
        """Nothing is added yet."""
        super().__init__(inputs, plan, group, space)
        self.held, self.layer = buffer, layer

    def _sums(self, tile: Tile) -> Tensor:
        return self.held.tile(self.held.sums, self, tile)

    def enter(self, tile: Tile) -> None:
        """Add a tile's products to the sums of the layers below."""
        sums, lowest = self._sums(tile), self.layer.number == 1
        if lowest:
            self.products(tile, sums)
        else:
            self.accumulate(sums, tile)
        if self.plan.shape.aligned and (lowest or not self.finite):
            # Hidden in every layer alike: what is added to −∞, or taken from it, changes nothing,
            # unless it is NaN, which earlier rows would then read.
            hide_edges(self.by_head(sums), tile, self.plan)

    def leave(self, tile: Tile) -> None:
        """Take this layer's products away again."""
        if self.layer.number > 1:
            self.accumulate(self._sums(tile), tile, sign=-1)

    def weights(self, tile: Tile, capped: bool = False, keep: bool = False) -> Tensor:
        """As for any scores."""
        sums, score, share = self._sums(tile), self.buffer("score", tile), self.layer.share
        bare = self.inputs.cap is None and self.inputs.bias is None and self.sink is None
        alike = self.plan.shape.aligned and self.group.mask.only_causal_or_window and not keep
        if bare and share == 1 and alike:
            # What causality and the window hide is −∞ in the sums.
            return torch.softmax(sums, -1, out=score)
        torch.mul(sums, share, out=score[..., : tile.width])
        return self.softmax(score, tile, capped, keep)

    def by_product(self, by_score: Tensor, tile: Tile) -> Tensor:
        """The gradient of the sums (n, c·r, W): that of this layer's scores joins those above."""
        layer, gradient = self.layer, self.held.tile(self.held.gradients, self, tile)
        mine = super().by_product(by_score, tile)[..., : tile.width]
        if layer.highest:
            return torch.mul(mine, layer.share, out=gradient)
        if layer.number == 1:
            # Nobody reads it again: written to the tile in the cache, not to memory.
            return torch.add(gradient, mine, alpha=layer.share, out=mine)
        return gradient.add_(mine, alpha=layer.share)


class _ResidualAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        buffer: ScoreBuffer,
        layer: _Layer,
        settings: Mapping[str, Any],
        seed: int,
        recorder: Recorder | None,
        token: Tensor,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        inputs = AttentionInputs.of(settings, tensors)
        buffer.add(layer.number, inputs.mask)
        ctx.save_for_backward(*tensors)
        ctx.rest = buffer, layer, settings, seed
        make = partial(ResidualTileScores, buffer, layer)
        return forward_tiles(inputs, seed, make, recorder)[0], token.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        refuse_second_derivative("the residual kernel", "backend='reference'")
        buffer, layer, settings, seed = ctx.rest
        if buffer.layers != layer.number:
            raise InputError(
                "residual scores allow only one backward pass, through all layers: add the "
                "losses and call backward once, or use backend='reference' or 'concatenated'"
            )
        inputs = AttentionInputs.of(settings, ctx.saved_tensors)
        layer = layer._replace(highest=not buffer.gradients)
        make = partial(ResidualTileScores, buffer, layer)
        found = backward_tiles(inputs, grads[0], seed, make)
        buffer.undone(layer.number)
        return None, None, None, None, None, grads[1], *found


def residual_attention(
    inputs: AttentionInputs, recorder: Recorder | None = None
) -> Float[Tensor, "b h t e"]:
    """softmax(Σ_m q_m k_mᵀ) · v, the products of this layer joining those of the layers below.

    `recorder` takes statistics, and changes nothing. Raises `InputError` where the layers below
    have another shape or see other pairs, in a recomputation by activation checkpointing, and in a
    second backward.
    """
    # `disable` loads the compiler, which takes longer than torch itself: only where one runs.
    if torch.compiler.is_compiling():
        out: Tensor = torch.compiler.disable(_attend)(inputs, recorder)  # type: ignore[no-untyped-call]
        return out
    return _attend(inputs, recorder)


def _attend(inputs: AttentionInputs, recorder: Recorder | None) -> Tensor:
    state = inputs.residual_scores
    assert state is not None
    state.enter("residual", inputs.stack)
    if state.buffer is None:
        state.buffer = ScoreBuffer(inputs.mask)
    token = inputs.q.new_empty(0) if state.token is None else state.token
    layer = _Layer(state.count, state.share)
    out: Tensor
    out, state.token = _ResidualAttention.apply(  # type: ignore[no-untyped-call]
        *(state.buffer, layer, inputs.settings, draw_seed(inputs), recorder, token, *inputs.tensors)
    )
    return out


def concatenated(inputs: AttentionInputs) -> AttentionInputs:
    """The same inputs without a residual: their features are those of this layer and all below."""
    state = inputs.residual_scores
    assert state is not None
    state.enter("concatenated", inputs.stack)
    q, k = state.features(inputs.q, inputs.k)
    return replace(inputs, q=q, k=k, residual_scores=None)

"""Residual scores (RealFormer): every layer attends with the sum of its scores and those below.

The kernel of the lowest layer decides for all layers how the sum is stored:

- residual: one buffer of scores for the whole stack. In the forward, layer n adds its products in
  place, tile by tile, and attends with softmax of the sums. Its backward finds s_n in the buffer,
  adds its gradient to a second buffer (the gradient of s_m sums those of all layers from m on), and
  subtracts its products again. So a stack of any depth stores one or two numbers per pair, and
  computes no more products than attention without residuals. Subtracting loses about the last digit
  of a score.
- concatenated: ⟨[q_1 … q_n], [k_1 … k_n]⟩ = Σ_m ⟨q_m, k_m⟩, exactly. No number per pair is stored
  and any kernel can compute it, the reference too, but layer n multiplies n·D features.

An empty tensor chains the layers of the buffer, so that the backward visits them from the top down.
The backward runs once, through all layers: a second backward, a second derivative, and a backward
that skips upper layers (a loss at an early exit) raise `InputError`.

Legend: B batch, H query heads, G key heads, r query heads per key head, T queries, S keys, D score
size, E value size; n key heads of a group, c query rows of a tile, W its columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels.inputs import AttentionInputs, AttentionMask
from normattn.kernels.numerics import refuse_second_derivative
from normattn.kernels.stats import Recorder
from normattn.kernels.tile_scores import TileScores, Workspace
from normattn.kernels.tiled import HeadGroup, Tile, TilePlan, mask_edges
from normattn.kernels.tiled_backward import Gradients, backward_tiles, draw_seed, forward_tiles


class ScoreBuffer:
    """The sums of a stack of layers and their gradients, in float32 or wider.

    Each tile (n, c·r, W) is a separate tensor, by its first batch row, key head and query. So
    causal rows store only the keys up to their tile's last row, about half of T × S, and an
    allocator reuses the memory from step to step. `layers` is the number of layers in the sums.
    """

    def __init__(self, mask: AttentionMask) -> None:
        self.mask, self.layers = mask, 0
        self.sums: dict[tuple[int, int, int], Tensor] = {}
        self.gradients: dict[tuple[int, int, int], Tensor] = {}


class ResidualTileScores(TileScores):
    """Scores that are sums in a buffer, to which the forward adds its products.

    `number` counts the layers from 1; `share` is the factor of the sum.
    """

    def __init__(
        self,
        buffer: ScoreBuffer,
        number: int,
        share: float,
        inputs: AttentionInputs,
        plan: TilePlan,
        group: HeadGroup,
        workspace: Workspace,
    ) -> None:
        super().__init__(inputs, plan, group, workspace)
        self.score_buffer, self.number, self.share = buffer, number, share

    def _key(self, tile: Tile) -> tuple[int, int, int]:
        return self.group.batch.start, self.group.heads.start, tile.rows.start

    def before_forward(self, tile: Tile) -> None:
        """Add a tile's products to the sums of the layers below."""
        if self.number == 1:
            shape = self.q.shape[0], tile.num_rows * self.plan.repeat, tile.width
            sums = self.score_buffer.sums[self._key(tile)] = self.q.new_empty(shape)
            self.products(tile, sums)
        else:
            sums = self.score_buffer.sums[self._key(tile)]
            self.add_products(sums, tile)
        if self.plan.shape.aligned:
            # In every layer, since a NaN added to −∞ is NaN, which earlier rows would then read.
            mask_edges(self.split_heads(sums), tile, self.plan)

    def after_backward(self, tile: Tile) -> None:
        """Subtract this layer's products again."""
        if self.number > 1:
            self.add_products(self.score_buffer.sums[self._key(tile)], tile, sign=-1)

    def weights(self, tile: Tile, capped: bool = False, keep: bool = False) -> Tensor:
        """softmax of a tile's sums; see `TileScores.weights`."""
        sums, score = self.score_buffer.sums[self._key(tile)], self.buffer("score", tile)
        plain = self.inputs.cap is None and self.inputs.bias is None and self.sink is None
        masked = self.plan.shape.aligned and self.group.mask.only_causal_or_window
        if plain and self.share == 1 and masked and not keep:
            # The sums are −∞ already where causality and the window hide keys.
            return torch.softmax(sums, -1, out=score)
        torch.mul(sums, self.share, out=score[..., : tile.width])
        return self.softmax(score, tile, capped, keep)

    def grad_products(self, grad_score: Tensor, tile: Tile) -> Tensor:
        """The gradient of the sums (n, c·r, W): this layer's is added to those above."""
        gradients, key = self.score_buffer.gradients, self._key(tile)
        grad = super().grad_products(grad_score, tile)[..., : tile.width]
        if key not in gradients:
            gradients[key] = grad * self.share
            return gradients[key]
        if self.number == 1:
            # The last use: written to the tile in the cache, not to memory.
            return torch.add(gradients[key], grad, alpha=self.share, out=grad)
        return gradients[key].add_(grad, alpha=self.share)


class _ResidualAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layer: tuple[ScoreBuffer, int, float],
        settings: Mapping[str, Any],
        seed: int,
        recorder: Recorder | None,
        token: Tensor,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        inputs, (buffer, number, _) = AttentionInputs.of(settings, tensors), layer
        if buffer.layers != number - 1:
            raise InputError(
                "these residual scores were already used in a backward pass: each forward pass "
                "needs new `ResidualScores`"
            )
        for name in ("causal", "window", "sink_tokens", "aligned"):
            if getattr(buffer.mask, name) != getattr(inputs.mask, name):
                raise InputError(
                    "all layers that share residual scores must see the same pairs, but "
                    "causality, the sliding window or positions differ between them"
                )
        buffer.layers = number
        ctx.save_for_backward(*tensors)
        ctx.constants = layer, settings, seed
        make = partial(ResidualTileScores, *layer)
        return forward_tiles(inputs, seed, make, recorder)[0], token.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        refuse_second_derivative("the residual kernel", "backend='reference'")
        layer, settings, seed = ctx.constants
        buffer, number, _ = layer
        if buffer.layers != number:
            raise InputError(
                "residual scores allow only one backward pass, through all layers: add the "
                "losses and call backward once, or use backend='reference' or 'concatenated'"
            )
        inputs = AttentionInputs.of(settings, ctx.saved_tensors)
        input_grads = backward_tiles(inputs, grads[0], seed, partial(ResidualTileScores, *layer))
        buffer.layers = number - 1
        if number == 1:
            buffer.sums.clear()
            buffer.gradients.clear()
        return None, None, None, None, grads[1], *input_grads


def residual_attention(
    inputs: AttentionInputs, recorder: Recorder | None = None
) -> Float[Tensor, "b h t e"]:
    """softmax(Σ_m q_m k_mᵀ) · v: this layer's products are added to those of the layers below.

    `recorder` collects statistics without changing the result. Raises `InputError` if the layers
    below have another shape or see other pairs, in a recomputation and in a second backward.
    """
    state = inputs.residual_scores
    assert state is not None
    state.start_layer("residual", inputs)
    if state.buffer is None:
        state.buffer = ScoreBuffer(inputs.mask)
    token = inputs.q.new_empty(0) if state.token is None else state.token
    layer = state.buffer, state.count, state.share
    out: Tensor
    out, state.token = _ResidualAttention.apply(  # type: ignore[no-untyped-call]
        *(layer, inputs.settings, draw_seed(inputs), recorder, token, *inputs.tensors)
    )
    return out

"""The scores of a layer that joins those below: the sums of a buffer, tile by tile.

Legend: n key heads of a group, r query heads per key head, c token rows of a tile, W its columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normattn.kernels.problem import Problem
from normattn.kernels.score_buffer import LayerScores
from normattn.kernels.scores import Scores
from normattn.kernels.tiles import Group, Plan, Tile, hide_edges


class SummedScores(Scores):
    """The scores are the sums that stand in a buffer, to which a forward adds its products."""

    def __init__(self, problem: Problem, plan: Plan, group: Group, layer: LayerScores) -> None:
        """`layer` is the buffer as this layer sees it."""
        super().__init__(problem, plan, group)
        self.layer = layer

    def enter(self, tile: Tile) -> None:
        """Add a tile's products to the sums of the layers below."""
        operands, products = self.operands, self.products
        sums = self.layer.sums.tile(operands.group, tile)
        if not self.layer.lowest:
            products.accumulate(sums, tile)
        elif sums.dtype == operands.q.dtype:
            products.scores(tile, sums)
        else:
            narrow = products.room("products", tile)[..., : tile.width]
            products.scores(tile, narrow)
            sums.copy_(narrow)
        if operands.plan.aligned and (self.layer.lowest or not self.layer.finite):
            # Hidden in every layer alike: what is added to −∞, or taken from it, changes nothing,
            # unless it is NaN, which earlier rows would then read.
            hide_edges(operands.apart(sums), tile, operands.plan.keys - operands.plan.queries)

    def leave(self, tile: Tile) -> None:
        """Take this layer's products away again."""
        if not self.layer.lowest:
            sums = self.layer.sums.tile(self.operands.group, tile)
            self.products.accumulate(sums, tile, sign=-1)

    def weights(self, tile: Tile, capped: bool = False, kept: bool = False) -> Tensor:
        """As for any scores; in wide type until the weights are known."""
        layer, plan = self.layer, self.operands.plan
        sums = layer.sums.tile(self.operands.group, tile)
        score = self.products.room("score", tile)
        same = score.dtype == sums.dtype
        wide = score if same else self.products.room("wide", tile, sums.dtype)
        bare = self.problem.cap is None and self.problem.bias is None and self.extra is None
        alike = plan.aligned and self.operands.group.seen.regular and not kept
        if bare and layer.share == 1 and alike:
            # What causality and the window hide is −∞ in the sums.
            torch.softmax(sums, -1, out=wide)
        else:
            torch.mul(sums, layer.share, out=wide[..., : tile.width])
            wide = self.softmax(wide, tile, capped, kept)
        return wide if same else score.copy_(wide)

    def by_product(self, by_score: Tensor, tile: Tile) -> Tensor:
        """The gradient of the sums (n, c·r, W): that of this layer's scores joins those above."""
        layer = self.layer
        assert layer.gradients is not None
        gradient = layer.gradients.tile(self.operands.group, tile)
        mine = super().by_product(by_score, tile)[..., : tile.width]
        if layer.highest:
            torch.mul(mine, layer.share, out=gradient)
        elif layer.lowest and gradient.dtype == mine.dtype:
            # Nobody reads it again: written to the tile in the cache, not to memory.
            return torch.add(gradient, mine, alpha=layer.share, out=mine)
        else:
            gradient.add_(mine, alpha=layer.share)
        return gradient if gradient.dtype == mine.dtype else mine.copy_(gradient)

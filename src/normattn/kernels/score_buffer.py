"""Scores of all pairs that some row sees, packed tile by tile, and which layers are in them.

Legend: G key heads, r query heads per key head; n key heads of a group, c token rows of a tile,
W its columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels.tiles import Group, Plan, Tile


class ScoreBuffer:
    """A number for each pair, in float32 (float64 for float64), each tile's (n, c·r, W) by itself.

    Causal rows hold the keys up to their tile's last row: about half of T × S. Pieces of that size
    are what an allocator keeps from step to step; one large piece would be fresh pages every time.
    """

    def __init__(self, like: Tensor, plan: Plan) -> None:
        """Nothing yet: a tile is taken, uninitialised, when it is first asked for."""
        self.repeat = plan.repeat
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.like = like.new_empty(0, dtype=dtype)
        self.tiles: dict[tuple[int, int, int], Tensor] = {}

    def tile(self, group: Group, tile: Tile) -> Tensor:
        """The scores (n, c·r, W) of a group's tile."""
        name = group.batch.start, group.heads.start, tile.rows.start
        if name not in self.tiles:
            n = (group.batch.stop - group.batch.start) * (group.heads.stop - group.heads.start)
            lines = (tile.rows.stop - tile.rows.start) * self.repeat
            self.tiles[name] = self.like.new_empty(n, lines, tile.width)
        return self.tiles[name]


@dataclass(frozen=True)
class LayerScores:
    """The buffers as one layer sees them.

    `lowest`: nothing is below it; `share` multiplies the sum before softmax. In the backward
    `gradients` holds those of the sums; `highest`: no layer above has written any yet. `finite`: no
    query or key of this layer is NaN.
    """

    sums: ScoreBuffer
    share: float
    lowest: bool
    gradients: ScoreBuffer | None = None
    highest: bool = False
    finite: bool = True


@dataclass
class Ledger:
    """The one buffer of a stack, and which layers are in it.

    `remembered` has the queries and keys of the layers that a backward may have to undo.
    """

    plan: Plan
    sums: ScoreBuffer | None = None
    gradients: ScoreBuffer | None = None
    at: int = 0
    remembered: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def up(self, like: Tensor, plan: Plan, number: int, share: float) -> LayerScores:
        """For the forward of layer `number`, from 1."""
        if number == 1:
            self.sums = ScoreBuffer(like, plan)
        if self.sums is None or self.at != number - 1:
            raise InputError(
                "a layer was to add to carried scores that a backward has undone already: make a "
                "new carry for each forward"
            )
        self._refuse_other_pairs(plan)
        self.at = number
        return LayerScores(self.sums, share, lowest=number == 1)

    def down(self, like: Tensor, plan: Plan, number: int, share: float) -> LayerScores:
        """For the backward of layer `number`, whose scores are then the last in the buffer."""
        assert self.sums is not None
        highest = self.gradients is None
        if self.gradients is None:
            self.gradients = ScoreBuffer(like, plan)
        return LayerScores(self.sums, share, number == 1, self.gradients, highest)

    def undone(self, number: int) -> None:
        """Layer `number` is no longer in the buffer."""
        self.at = number - 1
        self.remembered.pop(number, None)
        if number == 1:
            self.sums = self.gradients = None

    def _refuse_other_pairs(self, plan: Plan) -> None:
        mine, theirs = self.plan, plan
        for one in ("causal", "window", "kept"):
            if getattr(mine.seen, one) != getattr(theirs.seen, one):
                raise InputError(
                    "all layers that carry scores must see the same pairs, but causality or the "
                    "sliding window differs between them"
                )
        if mine.aligned != theirs.aligned:
            raise InputError(
                "all layers that carry scores must see the same pairs, but positions differ"
            )

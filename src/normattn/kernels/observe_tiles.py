"""An eye on tiles: what it must know of each, and the pass that only looks.

Legend: B batch, G key heads, r query heads per key head, T queries, S keys; n = b·g of a group, c
token rows of a tile, W its columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normattn.kernels.observe import Eye, Looked
from normattn.kernels.operands import Operands
from normattn.kernels.problem import Problem
from normattn.kernels.scores import Scores
from normattn.kernels.tiles import Plan, Tile


def show_tile(eye: Eye, scores: Scores, tile: Tile) -> None:
    """Let an eye read the scores and weights that `scores` has just made, and kept."""
    if scores.pair is None or not tile.width:
        return
    rows = scores.operands
    seen = rows.group.seen

    def put(rooms: Tensor, values: Tensor) -> None:
        group, repeat = rows.group, rows.plan.repeat
        apart = rooms.view(*rooms.shape[:2], -1, repeat, rooms.shape[-1])
        own = apart[:, group.batch, group.heads, :, tile.rows].transpose(3, 4)
        own.copy_(values.view(own.shape))

    def first(weight: Tensor) -> Tensor | None:
        return _by_column(rows, tile, weight) if seen.aligned else _by_mask(rows, tile, weight)

    def mean(weight: Tensor, function: Tensor) -> Tensor:
        parts = []
        for span, where in tile.laid():
            table = rows.spread(function[seen.distance(tile.rows, span.columns).abs()])
            parts.append((rows.apart(weight[..., : tile.width])[..., where] * table).sum(-1))
        return torch.stack(parts).sum(0).flatten(0, 1).flatten(1)

    eye.show(*scores.pair, Looked(tile.width, first, mean), put)


def _by_column(rows: Operands, tile: Tile, weight: Tensor) -> Tensor | None:
    """The weight on the first column, the only one that can be the first token."""
    columns = [weight[..., where.start] for span, where in tile.laid() if span.start == 0]
    if not columns:
        return None
    return columns[0] if len(columns) == 1 else columns[0] + columns[1]


def _by_mask(rows: Operands, tile: Tile, weight: Tensor) -> Tensor:
    """The weight on the keys at position 0, of which a query sees one at most."""
    parts = []
    for span, where in tile.laid():
        first = (rows.group.seen.key[..., span.columns] == 0)[..., None, :]
        first = first[:, None] if first.dim() == 3 else first
        parts.append((rows.apart(weight)[..., where] * rows.spread(first)).sum(-1))
    return torch.stack(parts).sum(0).flatten(0, 1).flatten(1)


@torch.no_grad()
def look_over(problem: Problem, eye: Eye) -> None:
    """Show every tile of a problem that another kernel computes: scores and weights once more."""
    plan = Plan.of(problem)
    for group in plan.groups(problem.q):
        scores = Scores(problem, plan, group)
        for tile in plan.tiles:
            scores.weights(tile, kept=True)
            show_tile(eye, scores, tile)

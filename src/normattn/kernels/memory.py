"""How much memory a kernel takes beside its operands and its output: an estimate of a forward."""

from __future__ import annotations

import torch

from normattn.kernels.problem import Problem
from normattn.kernels.strips import strip_rows
from normattn.kernels.tiles import Plan


def working_bytes(kernel: str, problem: Problem) -> int:
    """Bytes of a forward beside q, k, v and the output.

    The reference holds scores and weights, T × S each, strips those of some rows; the stock kernels
    a log-sum-exp, and of two parts their outputs; tiles one tile of scores and, in half precision,
    a group's keys across; a carry, which serves all layers, a number for each pair.
    """
    batch, heads, rows, _ = problem.q.shape
    size = problem.q.element_size()
    if kernel == "reference":
        return 2 * batch * heads * rows * problem.v.shape[2] * size
    if kernel == "strips":
        return 2 * batch * heads * strip_rows(problem) * problem.v.shape[2] * size
    if kernel == "carried":
        number_bytes = 8 if problem.q.dtype == torch.float64 else 4
        pairs: int = sum((t.rows.stop - t.rows.start) * t.width for t in Plan.of(problem).tiles)
        return _tile(problem, near_only=False) + batch * heads * pairs * number_bytes
    lines = batch * heads * rows * 4
    if kernel == "fused":
        return lines
    if kernel == "two-regime-flash":
        # Each part's output and log-sum-exp, and those of both for their shares.
        return 2 * batch * heads * rows * problem.v.shape[3] * size + 4 * lines
    if kernel == "two-regime":
        far = batch * heads * rows * problem.v.shape[3] * size
        return _tile(problem, near_only=True) + far + 4 * lines
    return _tile(problem, near_only=False)


def _tile(problem: Problem, near_only: bool) -> int:
    """The largest tile of the first, largest group."""
    plan = Plan.of(problem, near_only)
    group = next(plan.groups(problem.q), None)
    if group is None:
        return 0
    batch, heads = group.batch, group.heads
    many: int = (batch.stop - batch.start) * (heads.stop - heads.start)
    rows: int = max(tile.rows.stop - tile.rows.start for tile in plan.tiles) * plan.repeat
    width = max(tile.width for tile in plan.tiles)
    scores = many * rows * width
    turned = many * plan.keys * problem.q.shape[3] if problem.q.element_size() == 2 else 0
    return (scores + turned) * problem.q.element_size()

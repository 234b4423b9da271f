"""The definition, a strip of query rows after the other: any problem without a T × S matrix.

What needs whole rows of scores, or learns a number for each pair, no tile of the other kernels
serves. A strip holds all keys of a few rows; its backward computes it once more, so that between
forward and backward nothing per pair is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from normattn.kernels.observe import Eye
from normattn.kernels.place import on_cpu
from normattn.kernels.problem import Problem
from normattn.kernels.reference import reference

# Bytes of a strip's scores: about what a core's caches hold; a GPU must be filled instead.
STRIP_BYTES, DEVICE_STRIP_BYTES = 2**22, 2**28


def strip_rows(problem: Problem) -> int:
    """How many query rows a strip has."""
    q = problem.q
    numbers = q.shape[0] * q.shape[1] + (0 if problem.pairs is None else problem.pairs.width)
    size = STRIP_BYTES if on_cpu(q) else DEVICE_STRIP_BYTES
    row = max(1, numbers * problem.v.shape[2] * q.element_size())
    return max(1, min(q.shape[2], size // row))


def strips(problem: Problem, eye: Eye | None = None) -> Float[Tensor, "b h t e"]:
    """softmax(score) · v by strips of about 4 MiB of scores on a CPU; `eye` looks on."""
    out, selection = [], problem.selection
    for rows, part in _parts(problem):
        if selection is not None:
            part = replace(part, selection=selection.part(rows, part.v.shape[2]))
        if torch.is_grad_enabled():
            dropped = problem.dropout > 0
            made = checkpoint(reference, part, use_reentrant=False, preserve_rng_state=dropped)
            assert isinstance(made, Tensor)
            out.append(made)
        else:
            out.append(reference(part))
        if selection is not None and part.selection is not None:
            # Not by the strip's own object, which its backward writes to once more.
            selection = selection.behind(part.selection)
        if eye is not None:
            with torch.no_grad():
                # Without dropout, which would draw from the generator once more.
                reference(replace(part, dropout=0.0), eye, rows)
    if problem.selection is not None and selection is not None:
        problem.selection.after = selection.before
    return torch.cat(out, 2)


def _parts(problem: Problem) -> Iterator[tuple[slice, Problem]]:
    """Rows and what is asked of them; without the keys that none of them sees."""
    queries, keys, step = problem.q.shape[2], problem.v.shape[2], strip_rows(problem)
    seen = problem.visibility
    last = seen.causal and seen.aligned and queries <= keys
    for start in range(0, max(1, queries), step):
        rows = slice(start, min(start + step, queries))
        yield rows, _part(problem, rows, keys - queries + rows.stop if last else keys)


def _part(problem: Problem, rows: slice, keys: int) -> Problem:
    """The problem of some rows and the first `keys` keys."""
    p = problem
    far_q, far_k = p.far_q, p.far_k
    return replace(
        p,
        q=p.q[:, :, rows],
        k=p.k[:, :, : max(0, keys - p.near_start)],
        v=p.v[:, :, :keys],
        far_q=None if far_q is None else far_q[:, :, rows],
        far_k=None if far_k is None else far_k[:, :, :keys],
        visibility=p.visibility.part(rows, keys),
        pairs=None if p.pairs is None else p.pairs.part(rows),
    )

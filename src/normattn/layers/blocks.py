"""Rows of queries and their positions: those that are counted, and those of each block.

Legend: T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels.stats import confine
from normattn.plain import keepable
from normattn.score import Positions, ScoreSpec


def regular_positions(queries: int, keys: int, device: torch.device) -> Positions:
    """Causal positions of the last `queries` of `keys` tokens."""
    if queries > keys or not keepable():
        return Positions.of(queries, keys, True, device)
    capacity = max(64, 1 << (keys - 1).bit_length())
    return _counted(capacity, device).part(slice(keys - queries, keys), keys)


@lru_cache(maxsize=64)
def _counted(capacity: int, device: torch.device) -> Positions:
    with torch.inference_mode(False):
        return Positions.of(capacity, capacity, True, device)


def in_blocks(
    spec: ScoreSpec, positions: Positions, part: Callable[[slice, int, int], Tensor]
) -> Float[Tensor, "b h t e"]:
    """All query rows at once, or, where the score works by blocks, those of each block.

    `part(rows, keys, block)` attends from some rows to the first `keys` keys as `block` reads
    them. Rows of a batch may reach a block at different times: each keeps its own block's output.
    """
    queries, keys = positions.query.shape[-1], positions.key.shape[-1]
    if not spec.blockwise or queries == 0:
        return part(slice(0, queries), keys, 0)
    if torch.compiler.is_compiling():
        raise InputError(
            f"{spec.block[0]} computes blocks of rows that depend on positions, which a compiler "
            "does not know: run it uncompiled, or use a rope scaling with fixed frequencies"
        )
    pieces: list[Tensor] = []
    mixed: Tensor | None = None
    for number, span, members in _blocks(positions, spec.block[1]):
        confine(span, members)
        piece = part(span, keys - queries + span.stop if positions.ordered else keys, number)
        if members is None:
            pieces.append(piece)
            continue
        whole = piece.new_zeros(*piece.shape[:2], queries, piece.shape[3])
        whole[:, :, span] = torch.where(members.reshape(-1, 1, piece.shape[2], 1), piece, 0.0)
        mixed = whole if mixed is None else mixed + whole
    if mixed is not None:
        return mixed
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)


def _blocks(positions: Positions, length: int) -> Iterator[tuple[int, slice, Tensor | None]]:
    """Each block, the rows among which its own are, and which these are; None for all of them."""
    queries, keys = positions.query.shape[-1], positions.key.shape[-1]
    if positions.regular and queries <= keys:
        # Known without a look at the numbers.
        first = queries - keys
        for number in range(-first // length, (keys - 1) // length + 1):
            start = first + number * length
            yield number, slice(max(0, start), min(queries, start + length)), None
        return
    block = positions.query // length
    if not block.numel():
        yield 0, slice(0, queries), None
        return
    lowest, highest = int(block.min()), int(block.max())
    if lowest == highest:
        yield lowest, slice(0, queries), None
        return
    for number in range(lowest, highest + 1):
        members = block == number
        rows = members.reshape(-1, queries).any(0).nonzero()[:, 0]
        if rows.numel():
            span = slice(int(rows[0]), int(rows[-1]) + 1)
            every = members.dim() == 1 and positions.ordered
            yield number, span, None if every else members[..., span]

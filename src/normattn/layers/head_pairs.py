"""Heads in pairs: both read the values of both, and one output is made of the two.

Key heads 2·g and 2·g + 1 are a pair, and so are the query heads that read them, in their order.

Legend: B batch, H query heads, G key heads, S keys, T queries, D value size of a head.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.score import Score, ScoreSpec


def paired_values(
    spec: ScoreSpec, v: Float[Tensor, "b g s d"], head_dim: int
) -> Float[Tensor, "b g s e"]:
    """The values of each head and its partner side by side, E = 2·D; v itself without pairs."""
    if spec.difference is None:
        return v
    if v.shape[-1] != head_dim:
        raise InputError(
            f"{spec.name} norms the values of two heads side by side, whose size must be that of "
            f"the keys, {head_dim}, but it is {v.shape[-1]}"
        )
    batch, heads, keys, size = v.shape
    both = v.reshape(batch, heads // 2, 2, keys, size).transpose(2, 3).flatten(3)
    return both.repeat_interleave(2, 1)


def joined_pairs(score: Score, o: Float[Tensor, "b h t e"]) -> Float[Tensor, "b h t d"]:
    """What each pair makes of the outputs of its heads, in two halves, as heads; else o itself."""
    part = score.spec.difference
    if part is None or score.difference is None:
        return o
    key_pairs, repeat = score.kv_heads // 2, score.heads // score.kv_heads
    pairs = o.reshape(o.shape[0], key_pairs, 2, repeat, *o.shape[2:])
    first, second = (pairs[:, :, side].flatten(1, 2) for side in (0, 1))
    joined = part.joined(first, second, dict(score.difference.items()))
    halves = joined.reshape(o.shape[0], key_pairs, repeat, *o.shape[2:]).chunk(2, -1)
    return torch.stack(halves, 2).flatten(1, 3)

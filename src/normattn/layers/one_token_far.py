"""One new token's attention where distant keys are scored by another regime.

The cache holds keys turned to their far positions. The last w are kept turned to their near
positions as well, so that a step turns one key only: near scores are ⟨R_i q, R_j k⟩ whatever i is.

Legend: B batch, H query heads, G key heads, r = H/G, S tokens in all, D head dimension, C capacity,
E value size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.layers.attend import regular_positions
from normattn.layers.cache import KeyValueCache, Room
from normattn.layers.one_token import Step, Turn, laid_out, spread
from normattn.score import Score
from normattn.score.rotary import RotaryTables, far_to_near, key_tables, query_tables


@dataclass(frozen=True)
class OneTokenFar:
    """Turns for positions 0 … C − 1 of one score in one dtype; λ is in those of the query.

    `query` and `key` hold near and far turns side by side (C, 2, 1, 1, 1, D), and share their
    partners.
    """

    step: Step
    query: Turn
    key: Turn
    window: int

    def __call__(
        self,
        q: Float[Tensor, "b h 1 d"],
        k: Float[Tensor, "b g 1 d"],
        v: Float[Tensor, "b g 1 e"],
        score: Score,
        cache: KeyValueCache,
    ) -> Float[Tensor, "b h 1 e"]:
        """The token's output; its key and value join the cache."""
        at, heads, groups = cache.length, q.shape[1], k.shape[1]
        both, _ = self.step.spoilt(self.step.normed(q, k, score))
        partner = both.gather(-1, self.key.partner)
        (q, k), (q_partner, k_partner) = (
            x.split_with_sizes((heads, groups), 1) for x in (both, partner)
        )
        q = torch.addcmul(q * self.query.cos[at], q_partner, self.query.sin[at])
        near_q, far_q = (q if score.scale is None else q * score.scale).unbind()
        near_k, far_k = torch.addcmul(k * self.key.cos[at], k_partner, self.key.sin[at]).unbind()
        keys, values = cache.append(far_k, v)
        near = self._near(score, cache, keys, near_k)
        # Query heads that share a key head are rows of one product.
        batch, _, _, size = self.step.shapes[0]
        shape = (batch, groups, heads // groups, size)
        far = max(0, at + 1 - self.window)
        score_near = near_q.reshape(shape) @ near.transpose(-1, -2)
        if far:
            distant = far_q.reshape(shape) @ keys[:, :, :far].transpose(-1, -2)
            weight = torch.softmax(torch.cat((distant, score_near), -1), -1)
        else:
            weight = torch.softmax(score_near, -1)
        return (weight @ values).reshape(batch, heads, 1, -1)

    def _near(self, score: Score, cache: KeyValueCache, keys: Tensor, new: Tensor) -> Tensor:
        """The last `window` keys at their near positions."""
        room, end = cache.near, cache.length
        start = max(0, end - self.window)
        if cache.near_end != end - 1 or end - 1 - room.used > start:
            # The cache was filled or cut by other calls: turn the window once.
            places = torch.arange(start, end)
            turn = far_to_near(self.step.spec, score.head_dim, places, keys.dtype, start)
            assert turn is not None
            cache.near = room = Room(2)
            room.append(turn(keys[:, :, start:]))
        else:
            if room.used > 2 * self.window + 64:
                room.drop(0, room.used - self.window, 2 * self.window + 65)
            room.append(new)
        cache.near_end = end
        held = room.view(room.used)
        return held[:, :, room.used - (end - start) :]


def made_far(score: Score, length: int, q: Tensor, k: Tensor, v: Tensor) -> OneTokenFar:
    """The turns for a cache that is `length` tokens long now."""
    spec, step = score.spec, Step.of(score, length, q, k, v)
    assert spec.remapping is not None
    assert spec.remapping.window is not None
    with torch.inference_mode(False):
        at = regular_positions(step.capacity, step.capacity, q.device)
        query = query_tables(spec, score.head_dim, at, q.dtype)
        key = key_tables(spec, score.head_dim, at.key, q.dtype, 0)
        query_turn, key_turn = (_pair(fold, q, k) for fold in (query, key))
    return OneTokenFar(step, query_turn, key_turn, spec.remapping.window)


def _pair(fold: RotaryTables, q: Tensor, k: Tensor) -> Turn:
    """Near and far turns side by side; their partners are the same."""
    assert fold.near is not None
    assert fold.far is not None
    near, far = (spread(laid_out(rotation, q), q, k) for rotation in (fold.near, fold.far))
    cos, sin = (
        torch.stack(tables, 1)[:, :, None, None, None]
        for tables in ((near.cos, far.cos), (near.sin, far.sin))
    )
    return Turn(cos, sin, near.partner)

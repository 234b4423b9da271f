"""One new token over a cache as entries: ours for every score, and the plain way.

Legend: B batch, H heads, N tokens in the cache, D head dimension.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from normattn.bench.attending import Causal
from normattn.bench.case import Work
from normattn.bench.peers import Turn
from normattn.lab.runs.timing import Step
from normattn.layers.attend_cached import attention_cached
from normattn.layers.cache import StaticCache
from normattn.score import Score, ScoreSpec


@dataclass(frozen=True)
class DecodeStep:
    """A token attends to itself and to the `call.length` tokens before it, and is forgotten again.

    `spec` is our score with a static cache. None is the plain way: RoPE of the new query and key by
    prepared tables, key and value copied into their place, `scaled_dot_product_attention`.
    """

    call: Causal
    spec: str | None = None

    def build(self) -> Step:
        """The step over a filled cache."""
        return self._plain() if self.spec is None else self._ours(self.spec)

    def _ours(self, spec: str) -> Step:
        call, length = self.call, self.call.length
        score = Score(ScoreSpec.parse(spec), heads=call.heads, head_dim=call.size).to(call.device)
        cache = StaticCache(length + 1)
        q, k, v = self._token()

        @torch.inference_mode()
        def step() -> object:
            out = attention_cached(q, k, v, score, cache)
            cache.truncate(length)
            return out

        with torch.inference_mode():
            before = call.tensors(3)
            attention_cached(before[0], before[1], before[2], score, cache)
        return step

    def _plain(self) -> Step:
        call, length = self.call, self.call.length
        _, k, v = call.tensors(3)
        keys, values = (F.pad(x, (0, 0, 0, 1)) for x in (Turn.at(torch.arange(length), call)(k), v))
        turn = Turn.at(torch.tensor([length]), call)
        q, k, v = self._token()

        @torch.inference_mode()
        def step() -> object:
            keys[:, :, length:] = turn(k)
            values[:, :, length:] = v
            return F.scaled_dot_product_attention(turn(q), keys, values)

        return step

    def _token(self) -> list[torch.Tensor]:
        return dataclasses.replace(self.call, length=1).tensors(3)

    def work(self) -> Work:
        """Two products with one row; keys and values read once."""
        rows = self.call.batch * self.call.heads * (self.call.length + 1)
        moved = 2.0 * rows * self.call.size * self.call.dtype.itemsize
        return Work(4.0 * rows * self.call.size, moved, float(rows))

    def small(self) -> DecodeStep:
        """The same over a few tokens."""
        return dataclasses.replace(self, call=self.call.small())

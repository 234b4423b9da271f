"""DualChunk: relative positions by chunks, none of them beyond the training length."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.score.folded_parts import ChunkRulesPart
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class DualChunk(ChunkRulesPart):
    """Keys at j mod s; queries at i mod s, min(i mod s + s, c − 1) or c − 1 (arXiv 2402.17463).

    Which of the three is told by the chunks of s tokens: the key's is the query's own, the one
    before, or further away. c = s + w: in the chunk before the distance of keys that are fewer than
    w tokens away is what it was, so a text of c tokens is read as it was. `size` s defaults to
    3·L // 4 and `local` w to L − s, so that c is the training length L. Causal only. (The authors'
    code holds far queries at c. Where a gain follows the rotation, scores know more than distances,
    and short texts change past their first chunk.)
    """

    name: ClassVar[str] = "DualChunk"
    summary: ClassVar[str] = "relative positions by chunks: own, the one before, all further ones"
    equation: ClassVar[str] = (
        "ρ = q(i) − j mod s, q = i mod s | min(i mod s + s, c − 1) | c − 1, c = s + w"
    )
    source: ClassVar[str] = "arXiv 2402.17463; github.com/HKUNLP/ChunkLlama"
    used_by: ClassVar[str] = "Qwen2.5-1M (with YaRN)"
    local: int | None = None

    def __post_init__(self) -> None:
        self.require(self.size is None or self.size >= 1, "size", "at least 1")
        self.require(self.local is None or self.local >= 1, "local", "at least 1")

    def resolved(self, train_length: int | None, factor: float | None) -> DualChunk:
        """size = 3·L // 4 and local = L − size where not given."""
        if train_length is None:
            return self
        size = max(1, 3 * train_length // 4) if self.size is None else self.size
        local = max(1, train_length - size) if self.local is None else self.local
        return dataclasses.replace(self, size=size, local=local)

    @property
    def reach(self) -> int:
        """c = s + w."""
        return sum(self._chunks)

    def key_positions(self, key: Float[Tensor, "*b s"]) -> Float[Tensor, "*b s"]:
        """j mod s."""
        return key.remainder(self._chunks[0])

    def query_positions(self, query: Float[Tensor, "*b t"]) -> tuple[Float[Tensor, "*b t"], ...]:
        """i mod s, min(i mod s + s, c − 1), c − 1."""
        size, last = self._chunks[0], self.reach - 1
        own = query.remainder(size)
        return own, (own + size).clamp(max=last), torch.full_like(own, last)

    @property
    def _chunks(self) -> tuple[int, int]:
        """s and w."""
        if self.size is None or self.local is None:
            raise InputError("DualChunk needs size=… and local=…, or a training length")
        return self.size, self.local

"""Position remapping: other relative positions for distant pairs, after training; causal only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.score.parts.base import QUARTER_LENGTH, Part, Parts, Slot, number, one_of, register
from normattn.score.parts.rope_scaling import RopeScaling

QueryPositions = Float[Tensor, "*bq t"]
KeyPositions = Float[Tensor, "*bk s"]
FarPositions = tuple[QueryPositions, KeyPositions]


@dataclass(frozen=True)
class Remapping(Part):
    """The common base of `PositionRemapping` and `ChunkRemapping`."""

    slot = Slot.REMAPPING
    when = "inference-time"
    needs_rotary = True
    needs_causal = True
    excludes: ClassVar[Mapping[Slot, str]] = {
        Slot.ROPE_SCALING: "every relative position stays inside the trained range, so nothing is "
        "left to stretch"
    }


@dataclass(frozen=True)
class PositionRemapping(Remapping):
    """Two regimes of relative position: ordinary inside a window, remapped beyond it."""

    window: int | None = number(default=None, least=1, fill=QUARTER_LENGTH)

    def far_positions(self, query: QueryPositions, key: KeyPositions) -> FarPositions:
        """The positions to which queries and keys are rotated for pairs with i − j ≥ window.

        A key's far position depends only on its position, so that a cache can store rotated keys.
        """
        raise InputError(f"{self.name} defines no far positions")

    def visible_window(self) -> tuple[int | None, int]:
        """(w, sinks): hides keys with i − j ≥ w but not the first `sinks`; w None hides no key."""
        return None, 0


@dataclass(frozen=True)
class ChunkRemapping(Remapping):
    """Relative positions by chunks of `size` tokens, with three rules of query positions.

    The rules are for keys in the query's chunk, in the chunk before, and further away. A key has
    one position. The rows of a chunk are computed together (`ScoreSpec.blockwise`).
    """

    size: int | None = number(default=None, least=1)

    @property
    def reach(self) -> int:
        """The length up to which text is unchanged; all relative positions are smaller."""
        raise InputError(f"{self.name} defines no reach")

    def key_positions(self, key: KeyPositions) -> KeyPositions:
        """The positions to which keys are rotated."""
        raise InputError(f"{self.name} defines no positions of keys")

    def query_positions(self, query: QueryPositions) -> tuple[QueryPositions, ...]:
        """The positions of queries for each rule: own chunk, chunk before, further away."""
        raise InputError(f"{self.name} defines no positions of queries")


def blockwise(parts: Parts) -> Part | None:
    """The component for which each block of query rows needs its own keys, or None."""
    scaling, remapping = parts.get(Slot.ROPE_SCALING), parts.get(Slot.REMAPPING)
    if isinstance(scaling, RopeScaling) and scaling.blockwise:
        return scaling
    return remapping if isinstance(remapping, ChunkRemapping) else None


@register
class ReRoPE(PositionRemapping):
    """Relative positions are clipped at a window.

    `window` w defaults to L // 4.
    """

    equation = "s = ⟨R^(min(i−j, w)) q, k⟩"
    source = "kexue.fm/archives/9708"

    def far_positions(self, query: QueryPositions, key: KeyPositions) -> FarPositions:
        """Queries at w, keys at 0."""
        return torch.full_like(query, float(self.required("window"))), torch.zeros_like(key)


def _fitting_slope(part: Any, length: int | None, factor: float | None) -> float | None:
    """The s with which text of factor·L tokens fits into L."""
    if length is None or factor is None or part.window >= length:
        return None
    return float((factor * length - part.window) / (length - part.window))


@register
class LeakyReRoPE(PositionRemapping):
    """Relative positions grow more slowly beyond a window.

    `window` w defaults to L // 4, `s` to (factor·L − w)/(L − w): the longest text then fits exactly
    into L. s = 1 is RoPE, s → ∞ ReRoPE.
    """

    equation = "s = ⟨R^ρ q, k⟩, ρ = i−j for i−j < w, else w + (i−j−w)/s"
    source = "kexue.fm/archives/9731"
    s: float | None = number(default=None, least=1, fill=_fitting_slope)

    def far_positions(self, query: QueryPositions, key: KeyPositions) -> FarPositions:
        """Queries at (i + w(s − 1))/s, keys at j/s."""
        window, s = self.required("window"), self.required("s")
        return (query + window * (s - 1)) / s, key / s


def _smallest_group(part: Any, length: int | None, factor: float | None) -> int | None:
    """The smallest G with ⌊(longest − 1)/G⌋ + w − ⌊w/G⌋ < L, where the longest text is factor·L."""
    if length is None or factor is None or part.window >= length:
        return None
    window, group, last = part.window, 1, math.ceil(factor * length) - 1
    while last // group + window - window // group >= length:
        # Go to the next G that changes one of the two quotients.
        group = min(n // (n // group) + 1 for n in (last, window) if n // group)
    return group


@register
class SelfExtend(PositionRemapping):
    """Beyond a window, groups of tokens share a position.

    `window` w defaults to L // 4, `group` G to the smallest with which the longest text, factor·L
    tokens, reaches no position from L on. G = 1 is RoPE.
    """

    equation = "s = ⟨R^ρ q, k⟩, ρ = i−j for i−j < w, else ⌊i/G⌋ − ⌊j/G⌋ + w − ⌊w/G⌋"
    source = "arXiv 2401.01325"
    group: int | None = number(default=None, least=1, fill=_smallest_group)

    def far_positions(self, query: QueryPositions, key: KeyPositions) -> FarPositions:
        """Queries at ⌊i/G⌋ + w − ⌊w/G⌋, keys at ⌊j/G⌋."""
        window, group = self.required("window"), self.required("group")
        far = torch.div(query, group, rounding_mode="floor") + window - window // group
        return far, torch.div(key, group, rounding_mode="floor")


@register
class StreamingLLM(PositionRemapping):
    """Only the first tokens and a window of recent ones are visible.

    Positions are those within the cache of sinks + w tokens: for a sink that has left the window,
    the query is at min(i, sinks + w − 1). `window` w defaults to L − sinks (at least 1), so that no
    position exceeds the trained ones. Nothing changes up to sinks + w tokens.
    """

    equation = (
        "j < sinks or i−j < w; s = ⟨R^ρ q, k⟩, ρ = i−j for i−j < w, else min(i, sinks+w−1) − j"
    )
    source = "arXiv 2309.17453"
    window: int | None = number(
        default=None, least=1, fill=lambda part, length, _: length and max(1, length - part.sinks)
    )
    sinks: int = number(default=4, least=0)

    def far_positions(self, query: QueryPositions, key: KeyPositions) -> FarPositions:
        """Queries at min(i, sinks + w − 1), keys at j."""
        return query.clamp(max=self.sinks + self.required("window") - 1), key

    def visible_window(self) -> tuple[int | None, int]:
        """(w, sinks)."""
        return self.window, self.sinks


@register
class DualChunk(ChunkRemapping):
    """Relative positions depend on the chunk: the same, the one before, or an earlier one.

    Keys are at j mod s; the chunks of s tokens decide which of the three positions a query has. In
    the previous chunk, keys fewer than w tokens away keep their distance, so a text of c = s + w
    tokens does not change. `size` s defaults to 3·L // 4 and `local` w to L − s, so that c is the
    training length L. The authors' code and vLLM place far queries one position further, at c:
    `beyond=1`. (If a gain follows the rotation, scores depend on more than distances, and short
    texts change after their first chunk.)
    """

    equation = (
        "ρ = q(i) − j mod s, q = i mod s | min(i mod s + s, c′) | c′, c′ = s + w − 1 + beyond"
    )
    source = "arXiv 2402.17463; github.com/HKUNLP/ChunkLlama"
    used_by = "Qwen2.5-1M (with YaRNTemperature)"
    size: int | None = number(
        default=None, least=1, fill=lambda part, length, _: length and max(1, 3 * length // 4)
    )
    local: int | None = number(
        default=None, least=1, fill=lambda part, length, _: length and max(1, length - part.size)
    )
    beyond: int = one_of(0, 1, default=0)

    @property
    def reach(self) -> int:
        """c = s + w."""
        return int(self.required("size") + self.required("local"))

    def key_positions(self, key: KeyPositions) -> KeyPositions:
        """j mod s."""
        return key.remainder(self.required("size"))

    def query_positions(self, query: QueryPositions) -> tuple[QueryPositions, ...]:
        """i mod s, min(i mod s + s, c − 1 + beyond), c − 1 + beyond."""
        size, last = self.required("size"), self.reach - 1 + self.beyond
        in_chunk = query.remainder(size)
        return in_chunk, (in_chunk + size).clamp(max=last), torch.full_like(in_chunk, last)

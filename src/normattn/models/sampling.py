"""Which token follows: the likeliest, or one drawn at random from the likely ones.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normattn.errors import InputError


@dataclass(frozen=True)
class Sampling:
    """p ∝ exp(logit / temperature), over the `top_k` likeliest tokens, over the `top_p` nucleus.

    temperature: 0 (default) always takes the likeliest token. top_k: so many tokens stay. top_p:
    of these, sorted, the fewest whose probabilities add up to at least top_p stay. Tokens of equal
    probability are ordered by their id. Raises `InputError` for values out of range, and for top_k
    and top_p beside temperature 0, where they would change nothing. Source of top_p: arXiv
    1904.09751.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(f"temperature is {self.temperature}; it must be 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k is {self.top_k}; it must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.greedy and not (self.top_k is None and self.top_p is None):
            raise InputError(
                "top_k and top_p choose among random tokens, and temperature 0 always takes the "
                "likeliest: give a temperature above 0, or neither of them"
            )

    @property
    def greedy(self) -> bool:
        """Whether nothing is random."""
        return self.temperature == 0

    def probabilities(
        self, logits: Float[Tensor, "b v"]
    ) -> tuple[Float[Tensor, "b k"], Int[Tensor, "b k"]]:
        """Probabilities in float64, falling, and their tokens; 0 for those left out."""
        wide, tokens = torch.sort(logits.double(), stable=True, dim=-1, descending=True)
        if self.top_k is not None:
            wide, tokens = wide[:, : self.top_k], tokens[:, : self.top_k]
        chance = torch.softmax(wide / self.temperature, -1)
        if self.top_p is not None and self.top_p < 1:
            before = chance.cumsum(-1) - chance
            chance = chance.masked_fill(before >= self.top_p, 0.0)
            chance = chance / chance.sum(-1, keepdim=True)
        return chance, tokens

    def next_tokens(
        self, logits: Float[Tensor, "b v"], generators: Sequence[torch.Generator]
    ) -> list[int]:
        """A token for each row, drawn with the row's own generator, one number each."""
        if not bool(torch.isfinite(logits.amax(-1)).all()):
            raise InputError("the model's logits are not finite: its weights cannot be used")
        if self.greedy:
            chosen: list[int] = logits.argmax(-1).tolist()
            return chosen
        chance, tokens = self.probabilities(logits)
        drawn = [
            torch.rand((), generator=generator, dtype=torch.float64) for generator in generators
        ]
        total = chance.cumsum(-1)
        mark = torch.stack(drawn)[:, None].to(total.device) * total[:, -1:]
        index = (total <= mark).sum(-1, keepdim=True).clamp(max=total.shape[-1] - 1)
        picked: list[int] = tokens.gather(-1, index)[:, 0].tolist()
        return picked


def row_generators(seed: int | Sequence[int], rows: int) -> list[torch.Generator]:
    """A generator for each row, of seed + row or of its own seed, so that rows are independent."""
    seeds = [seed + row for row in range(rows)] if isinstance(seed, int) else list(seed)
    if len(seeds) != rows:
        raise InputError(f"{len(seeds)} seeds were given for {rows} prompts")
    if any(not 0 <= row_seed < 1 << 63 for row_seed in seeds):
        raise InputError("a seed must be at least 0 and below 2^63")
    return [torch.Generator().manual_seed(row_seed) for row_seed in seeds]

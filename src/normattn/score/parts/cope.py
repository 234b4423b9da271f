"""CoPE: positions counted by gates, so that a query may count words or sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels import Visibility
from normattn.score.outer_parts import PairBiasPart
from normattn.score.part import Part, Slot
from normattn.score.registry import register


@register
@dataclass(frozen=True)
class CoPE(PairBiasPart):
    """b(i, j) = λ·⟨N_q(q_i), e[p(i, j)]⟩, p(i, j) = min(Σ_{j≤l≤i} σ(s(i, l)), P − 1). Causal only.

    Contextual positions (arXiv 2405.18719): a position is a sum of gates, which are made of the
    score itself, over the keys that the query sees from key j on; e between two whole positions is
    interpolated. e has `positions` P vectors (0 … P − 1), shared by the heads, which start at 0.
    With λ in front as for keys the score is λ·⟨q_i, k_j + e⟩, as the authors' code has it unless
    told otherwise.
    """

    name: ClassVar[str] = "CoPE"
    summary: ClassVar[str] = (
        "positions are sums of gates made of the scores, each with an embedding"
    )
    equation: ClassVar[str] = "b = λ·⟨q_i, e[p]⟩, p = Σ_{j≤l≤i} σ(s_il)"
    source: ClassVar[str] = "arXiv 2405.18719; github.com/facebookresearch/RAM"
    reads_queries: ClassVar[bool] = True
    positions: int = 64

    def __post_init__(self) -> None:
        self.require(self.positions >= 2, "positions", "at least 2")

    def learned(self, heads: int, head_dim: int) -> dict[str, Tensor]:
        """e = 0."""
        return {"e": torch.zeros(self.positions, head_dim)}

    def pairs(
        self, learned: Mapping[str, Tensor], dtype: torch.dtype, query: Tensor | None
    ) -> Counted:
        """⟨q, e⟩ of each query and whole position, before any key is looked at."""
        if query is None:
            raise InputError("CoPE needs the queries, of which positions are counted")
        return Counted(query.to(dtype) @ learned["e"].to(dtype).t())

    def conflict(self, parts: Mapping[Slot, Part]) -> str | None:
        """Queries are read between their normalisation and their rotation."""
        if Slot.ORDER in parts:
            order = parts[Slot.ORDER].name
            return (
                f"{order} and CoPE cannot be combined: CoPE reads normalised queries that have no "
                "position yet"
            )
        return None


@dataclass(frozen=True)
class Counted:
    """CoPE's bias of some queries: `table` holds λ·⟨q, e⟩ of each at the whole positions."""

    table: Float[Tensor, "b h t p"]

    @property
    def width(self) -> int:
        """Gates, positions, two indices of eight bytes and what they pick, for each head."""
        return 8 * self.table.shape[0] * self.table.shape[1]

    def part(self, rows: slice) -> Counted:
        """The bias of some of the queries."""
        return replace(self, table=self.table[:, :, rows])

    def values(self, score: Float[Tensor, "b h t s"], seen: Visibility) -> Float[Tensor, "b h t s"]:
        """Gates are summed from the last key that is seen down to each; hidden ones are 0."""
        order = seen.by_position(score)
        gate = torch.sigmoid(score.to(self.table.dtype))
        gate = gate if order is None else gate.gather(-1, order)
        position = gate.flip(-1).cumsum(-1).flip(-1)
        position = position if order is None else position.gather(-1, order.argsort(-1))
        last = self.table.shape[-1] - 1
        position = position.clamp(max=last)
        whole = position.detach().floor()
        # A position that is no number stays one by its share; as an index it would be none.
        low = whole.nan_to_num(0.0).long()
        below, above = (self.table.gather(-1, at) for at in (low, (low + 1).clamp(max=last)))
        return torch.lerp(below, above, position - whole)

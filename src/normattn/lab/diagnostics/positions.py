"""Whether a key's norm carries its position: sums over the texts of one trained model."""

from __future__ import annotations

from itertools import product

import polars as pl
import torch
from torch import Tensor

from normattn.lab.diagnostics.documents import Documents
from normattn.lab.diagnostics.key_norms import (
    FIRST,
    first_norms,
    key_norms,
    position_correlation,
    signed_elsewhere,
    varied,
)
from normattn.lab.diagnostics.watching import Seen

SIDES = ("", "raw_")
"""The key as the score sees it, and as it enters the score, before any norm."""


class NormPositions:
    """What key norms say of positions, by document, layer and key head.

    Rows, with `raw_` before their names for the key before its normalisation: `position`,
    Spearman's correlation of ‖k_j‖ with j within a text, for j ≥ `FIRST`, over the texts in which
    norms differ at all; `position_size`, the same in every second document, with the sign that the
    head has in the others (`signed_elsewhere`); `first_norms`, by j < `FIRST`: ‖k_j‖ over the
    median norm of the later keys. None of them for texts of fewer than `FIRST` + 2 tokens.
    """

    def __init__(self, documents: Documents, key_heads: int, length: int) -> None:
        self.documents, self.measurable = documents, length >= FIRST + 2
        self._sums = {
            f"{side}{name}": documents.room(key_heads, *axes)
            for side, (name, axes) in product(
                SIDES, (("position", ()), ("varied", ()), ("first_norms", (FIRST,)))
            )
        }

    def add(self, part: slice, seen: Seen) -> None:
        """Add what a layer has in a part of the texts."""
        if self.measurable:
            self._add("", part, seen.layer, seen.problem.k)
            self._add("raw_", part, seen.layer, seen.key)

    def _add(self, side: str, part: slice, layer: int, k: Tensor) -> None:
        norms = key_norms(k)
        differ = varied(norms[..., FIRST:])
        values = {
            "position": torch.where(differ, position_correlation(norms), 0.0),
            "varied": differ.double(),
            "first_norms": first_norms(norms).nan_to_num(0.0, 0.0, 0.0),
        }
        for name, value in values.items():
            self.documents.add(self._sums[side + name], part, layer, value)

    def measured(self) -> list[pl.DataFrame]:
        """The rows of the frame, without an identity."""
        if not self.measurable:
            return []
        return [frame for side in SIDES for frame in self._measured(side)]

    def _measured(self, side: str) -> list[pl.DataFrame]:
        rows, texts = self.documents.rows, self.documents.texts
        position, count = self._sums[f"{side}position"], self._sums[f"{side}varied"]
        first, edges = self._sums[f"{side}first_norms"], list(range(FIRST + 1))
        return [
            rows(f"{side}position", position, count),
            rows(f"{side}position_size", *signed_elsewhere(position, count)),
            rows(f"{side}first_norms", first, texts[..., None], axis="position", edges=edges),
        ]

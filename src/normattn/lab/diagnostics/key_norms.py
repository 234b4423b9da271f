"""The norms of a layer's keys, the attention that keys receive, and what norms say of positions.

Legend: D documents, n layers, H heads (of queries or of keys), B texts, G key heads, S keys;
F = `FIRST`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import polars as pl
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from normattn.errors import InputError
from normattn.lab.diagnostics.alpha import alpha
from normattn.lab.diagnostics.watching import Seen
from normattn.lab.stats import sums


def rank_correlation(a: Float[Tensor, "*rows n"], b: Float[Tensor, "*rows n"]) -> Tensor:
    """Spearman's correlation along the last axis, in float64: Pearson's of the ranks.

    Equal values share the mean of their ranks; where one side is all equal, the result is NaN.
    """
    x, y = _ranks(a), _ranks(b)
    x, y = x - x.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True)
    scale = (x.square().sum(-1) * y.square().sum(-1)).sqrt()
    return torch.where(scale > 0, (x * y).sum(-1) / scale, torch.nan)


def _ranks(values: Tensor) -> Tensor:
    """Ranks from 0 in float64, ties at their mean."""
    ordered = values.double().sort(-1).values.contiguous()
    values = values.double().contiguous()
    below = torch.searchsorted(ordered, values, right=False)
    upto = torch.searchsorted(ordered, values, right=True)
    return (below + upto - 1).double() / 2


Array = NDArray[np.float64]


class Documents:
    """The documents of some texts, and sums (D, n, H, …) over their texts."""

    def __init__(self, document_of_text: Sequence[str], layers: int) -> None:
        self.names = sorted(set(document_of_text))
        numbers = {name: index for index, name in enumerate(self.names)}
        self.of_text = np.array([numbers[name] for name in document_of_text])
        self.layers = layers

    @property
    def texts(self) -> Array:
        """How many texts each document has, (D, 1, 1)."""
        counted = np.bincount(self.of_text, minlength=len(self.names))
        return counted.astype(float)[:, None, None]

    def room(self, heads: int, *axes: int, dtype: Any = np.float64) -> NDArray[Any]:
        """Zeros (D, n, H, …)."""
        return np.zeros((len(self.names), self.layers, heads, *axes), dtype)

    def add(self, room: NDArray[Any], part: slice, layer: int, values: Tensor) -> None:
        """Add the values (B, H, …) that a layer has in a part of the texts."""
        np.add.at(room[:, layer], self.of_text[part], values.cpu().numpy())

    def rows(self, name: str, above: Array, below: Array, **axis: Any) -> pl.DataFrame:
        """A statistic by layer and head; `axis` and `edges` where there is a fourth axis."""
        below = np.broadcast_to(below, above.shape)
        return pl.concat(
            sums(name, self.names, above[at], below[at], layer=at[1], head=at[2], **axis)
            for at in product((slice(None),), range(self.layers), range(above.shape[2]))
        )


FIRST = 4
"""Keys at the start of a text that are measured apart: models like to park attention there."""

# Norms that differ by less than this share of their mean differ by rounding only.
_SAME = 1e-4
# Of a mean: finer differences between two keys are what turning them leaves of one norm.
_GRAIN = 1e-5


def key_norms(k: Float[Tensor, "b g s d"]) -> Float[Tensor, "b g s"]:
    """‖k_j‖ in float64."""
    norms: Tensor = torch.linalg.vector_norm(k.double(), dim=-1)
    return norms


def spread(norms: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows"]:
    """Standard deviation of the norms over their mean."""
    return norms.std(-1, correction=0) / norms.mean(-1)


def varied(norms: Float[Tensor, "*rows n"]) -> Tensor:
    """Whether norms differ by more than rounding: after a norm without gain they do not."""
    return spread(norms) > _SAME


def position_correlation(norms: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows"]:
    """Spearman's correlation of ‖k_j‖ with j, for j ≥ F: +1 where norms only grow.

    Norms are compared to 1e-5 of their mean: a token that comes twice has one norm in the lowest
    layer, and rounding must not rank it. NaN where norms are all equal or fewer than two are left.
    """
    rest = norms[..., FIRST:]
    rest = (rest / (rest.mean(-1, keepdim=True) * _GRAIN)).round()
    order = torch.arange(rest.shape[-1], dtype=torch.float64, device=norms.device)
    return rank_correlation(rest, order.expand(rest.shape))


def first_norms(norms: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows first"]:
    """‖k_0‖ … ‖k_(F−1)‖, each over the median norm of the keys after them."""
    return norms[..., :FIRST] / norms[..., FIRST:].quantile(0.5, -1, keepdim=True)


def signed_elsewhere(
    total: NDArray[np.float64], count: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sums by document (documents, …), every second one with the sign of all the others together.

    What documents have in common then shows its size, whichever its sign, so that heads of opposite
    signs can be averaged; chance gives 0, and an interval over documents keeps its promise,
    whatever the values within a document have in common. A mean of |·| is above 0 by chance, and a
    sign from all documents but one is all but the document's own. The documents that gave the
    signs, and those that nothing could sign, count for nothing; nor does a single one, which has no
    interval.
    """
    measuring = np.arange(len(total)) % 2 == 1
    sign = np.sign(total[~measuring].sum(0))
    several = (count[measuring] > 0).sum(0) > 1
    kept = measuring.reshape(-1, *[1] * (total.ndim - 1)) & (sign != 0) & several
    return np.where(kept, total * sign, 0.0), np.where(kept, count, 0.0)


_ROWS = 64


@torch.no_grad()
def received_attention(seen: Seen, horizon: int) -> Float[Tensor, "b h kept"]:
    """r_j = mean over i = j … j + horizon − 1 of α_ij · (i + 1), for the keys j ≤ S − horizon.

    Every key is looked at by the same number of queries at the same distances, so that neither its
    place nor the length of the text decides; 1 is what uniform attention gives. Computed in blocks
    of query rows: no (T, S) matrix is kept. Shapes: (B, H, S − horizon + 1). Raises `InputError`
    for a horizon that is not in 1 … S.
    """
    keys = seen.problem.k.shape[2]
    if not 1 <= horizon <= keys:
        raise InputError(f"a horizon must lie in 1 … {keys}, the number of keys, got {horizon}")
    kept = keys - horizon + 1
    batch, heads = seen.problem.q.shape[:2]
    total = torch.zeros(batch, heads, kept, dtype=torch.float64, device=seen.problem.q.device)
    for first in range(0, keys, _ROWS):
        query = torch.arange(first, min(first + _ROWS, keys), device=total.device)
        key = torch.arange(kept, device=total.device)
        behind = query[:, None] - key
        counted = (behind >= 0) & (behind < horizon)
        share = alpha(seen.problem, query)[..., :kept].double() * (query[:, None] + 1)
        total += (share * counted).sum(-2)
    return total / horizon


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

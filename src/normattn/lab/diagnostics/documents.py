"""Sums by document, layer and head, and the rows of the frame that they become.

Legend: D documents, n layers, H heads (of queries or of keys), B texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from torch import Tensor

from normattn.lab.stats import sums

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

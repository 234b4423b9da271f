"""Statistics that are functions of summed counts.

Whatever is drawn by the bootstrap is added up first and becomes a value then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Statistic:
    """One column: `of` maps sums of the `field`'s counts, shape (…, counts), to values (…).

    `higher` says which way is better, None for neither.
    """

    key: str
    title: str
    field: str
    of: Callable[[Array], Array]
    digits: int = 1
    higher: bool | None = True


def ratio_of(scale: float) -> Callable[[Array], Array]:
    """`scale` times the first count over the second."""

    def of(sums: Array) -> Array:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(scale * sums[..., 0] / sums[..., 1])

    return of

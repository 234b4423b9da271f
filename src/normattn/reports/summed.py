"""Statistics that are functions of summed counts: BLEU and chrF beside plain ratios.

A sentence is kept as a row of counts; whatever is drawn by the bootstrap is added up first and
becomes a score then, as the score of a corpus is defined.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
ORDERS = 4
CHARACTERS = 6
_BETA = 2.0


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


@runtime_checkable
class Counted(Protocol):
    """A trained model's counts on a test set, a row for each of its sentences (or images)."""

    @property
    def seed(self) -> int:
        """The training's seed."""
        ...

    @property
    def tokens(self) -> tuple[int, ...]:
        """How many predictions were scored in each row."""
        ...

    def counts(self, field: str) -> Array | None:
        """The counts of a statistic's field, (rows, counts); None where not measured."""
        ...


def bleu(sums: Array) -> Array:
    """BLEU (Papineni et al. 2002) as sacrebleu computes it, with exponential smoothing.

    `sums`: length of the translations, of the references, matching n-grams and n-grams of the
    translations for n = 1 … 4. BLEU = 100·min(1, exp(1 − r/c))·(Π_n p_n)^¼; a p_n without any match
    is 1/(2^k·n-grams), k counting such n from below. 0 where nothing matches.
    """
    length, reference = sums[..., 0], sums[..., 1]
    matches, grams = sums[..., 2 : 2 + ORDERS], sums[..., 2 + ORDERS :]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        smoothing = 2.0 ** np.cumsum(matches == 0, axis=-1)
        precision = np.where(matches > 0, matches / grams, 1 / (smoothing * grams))
        # Without n-grams of an order the translation has no score of that order: none at all.
        precision = np.where(grams > 0, precision, 0.0)
        penalty = np.minimum(1.0, np.exp(1 - reference / length))
        score = 100 * penalty * np.exp(np.log(precision).mean(-1))
    return np.where((matches.sum(-1) > 0) & (length > 0), score, 0.0)


def chrf(sums: Array) -> Array:
    """chrF2 (Popović 2015) as sacrebleu computes it.

    `sums`: for n = 1 … 6 the characters' n-grams of the translations, of the references, and those
    in both. Precision and recall are averaged over the orders that both have; F with β = 2.
    """
    counts = sums.reshape(*sums.shape[:-1], CHARACTERS, 3)
    ours, theirs, both = counts[..., 0], counts[..., 1], counts[..., 2]
    used = (ours > 0) & (theirs > 0)
    orders = np.maximum(1, used.sum(-1))
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.where(used, both / ours, 0.0).sum(-1) / orders
        recall = np.where(used, both / theirs, 0.0).sum(-1) / orders
        factor = _BETA**2
        score = 100 * (1 + factor) * precision * recall / (factor * precision + recall)
    return np.where(precision + recall > 0, score, 0.0)


def ratio_of(scale: float) -> Callable[[Array], Array]:
    """`scale` times the first count over the second."""

    def of(sums: Array) -> Array:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(scale * sums[..., 0] / sums[..., 1])

    return of

"""Guessing every word by its frequency: what a model has to beat before it has learnt anything."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

MARGIN = 0.1
"""Nats by which a training must beat the unigram model to have learnt anything."""


def unigram_nats(counts: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    """−ln((n_v + 1)/(N + V)) of every word v, in nats, (V,).

    `counts` (V,): n_v, how often each word of the vocabulary is in the training text; N is their
    sum. Every word is counted once more than it occurs, so that none is impossible.
    """
    raised = np.asarray(counts, np.float64) + 1.0
    nats: NDArray[np.float64] = -np.log(raised / raised.sum())
    return nats


def learnt_nothing(loss: float, unigram: float) -> bool:
    """Whether a loss, in nats, is less than `MARGIN` below that of the unigram model.

    A constant guess ends within a few hundredths of it, on either side.
    """
    return loss > unigram - MARGIN

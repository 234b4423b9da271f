"""When a training has learnt nothing: it is no better than guessing words by their frequency."""

from __future__ import annotations

MARGIN = 0.1
"""Nats by which a training must beat the unigram model to have learnt anything."""


def learnt_nothing(loss: float, unigram: float) -> bool:
    """Whether a loss, in nats, is less than `MARGIN` below that of the unigram model.

    A constant guess ends within a few hundredths of it, on either side.
    """
    return loss > unigram - MARGIN

"""BLEU, chrF and macro F1 from summed counts, equal to sacrebleu's and torchmetrics' own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
ORDERS = 4
CHARACTERS = 6
_BETA = 2.0


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


def macro_f1(above: Array, below: Array, whole_above: Array, whole_below: Array) -> Array:
    """The mean F1, in %, of the classes that are true or predicted anywhere.

    A bin is a class, `above` 2 · rightly predicted and `below` predicted + true. Of a resample,
    `whole` are the sums of all units: they say which classes count, and a class that no drawn unit
    has keeps its F1 there. Left out, rare classes, whose F1 is low, would make every resample look
    better than the whole.
    """
    known = _f1(whole_above, whole_below)
    counted = whole_below > 0
    scores = np.where(counted, np.where(below > 0, _f1(above, below), known), 0.0)
    return np.asarray(100 * scores.sum(-1) / np.maximum(1, counted.sum(-1)))


def _f1(above: Array, below: Array) -> Array:
    """F1 (0 … 1), 0 where there is nothing to divide by."""
    return np.asarray(above / np.maximum(below, 1e-300) * (below > 0))

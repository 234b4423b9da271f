"""Evaluate masked language models, and the unigram baseline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from normattn.lab.data.tokens import TokenSplit
from normattn.lab.data.windows import MaskedSet
from normattn.lab.evaluation.scorer import batches
from normattn.models.masked_lm import MaskedLM

MARGIN = 0.1
"""A model counts as trained if its loss is this many nats below the unigram loss."""


def unigram_nats(counts: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    """Return −ln((n_v + 1)/(N + V)) in nats of every token v, from its training count n_v."""
    smoothed = np.asarray(counts, np.float64) + 1.0
    return np.asarray(-np.log(smoothed / smoothed.sum()))


def learnt_nothing(loss: float, unigram: float) -> bool:
    """Return whether a loss in nats is not at least `MARGIN` below the unigram model's."""
    return loss > unigram - MARGIN


class MaskedSums(NamedTuple):
    """Sums by document, in the order of their names.

    `tokens` (D,): the chosen tokens; `loss` (D,) in nats; `correct` (D, N): correct predictions
    after each exit, the last of the model itself; (D, 1) without exits.
    """

    documents: tuple[str, ...]
    tokens: NDArray[np.int64]
    loss: NDArray[np.float64]
    correct: NDArray[np.int64]


def documents_of(texts: MaskedSet) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Return the sorted names of the documents, and the index of each text's document."""
    names, document_of = np.unique(texts.documents, return_inverse=True)
    return tuple(names.tolist()), document_of


def score_masked(
    model: MaskedLM,
    texts: MaskedSet,
    tokens_per_batch: int = 16384,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> MaskedSums:
    """Score every chosen token of `texts`, without dropout; `tokens_per_batch` bounds memory."""
    device = next(model.parameters()).device
    names, document_of = documents_of(texts)
    count = texts.rows.targets.shape[1]
    tokens = count * np.bincount(document_of, minlength=len(names))
    loss = np.zeros(len(names))
    correct = np.zeros((len(names), len(model.exits) + 1), dtype=np.int64)
    for rows in batches(len(texts), max(1, tokens_per_batch // texts.length)):
        batch = (torch.from_numpy(array[rows]).to(device) for array in texts.rows)
        scores = model.token_scores(*batch)
        np.add.at(loss, document_of[rows], scores.loss.double().sum(-1).cpu().numpy())
        hits = torch.cat([scores.exit_correct, scores.correct[None]]).sum(-1)
        np.add.at(correct, document_of[rows], hits.T.cpu().numpy())
        progress(min(rows.stop, len(texts)), len(texts))
    return MaskedSums(names, tokens, loss, correct)


def unigram_loss(train: TokenSplit, texts: MaskedSet, vocab_size: int) -> NDArray[np.float64]:
    """Return the loss of the training text's token frequencies, in nats by document."""
    nats = unigram_nats(train.token_counts(vocab_size))
    names, document_of = documents_of(texts)
    total = np.zeros(len(names))
    np.add.at(total, document_of, nats[texts.rows.targets].sum(1))
    return total

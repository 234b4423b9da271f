"""Evaluate retrieval tasks: the tokens of answers, by sample and depth."""

from __future__ import annotations

import numpy as np
import polars as pl
import torch
from jaxtyping import Float64, Int64

from normattn.errors import NormattnError
from normattn.lab.data.retrieval import RetrievalSet
from normattn.lab.evaluation.scorer import (
    TokenScorer,
    batches,
    rows_per_batch,
    scores_from,
    set_identity,
)
from normattn.lab.stats import Identity, MeasurementStore, digest, sums, with_identity


def evaluate_retrieval(
    scorer: TokenScorer,
    retrieval: RetrievalSet,
    model: Identity,
    *,
    store: MeasurementStore | None = None,
    tokens_per_batch: int = 16384,
) -> pl.DataFrame:
    """Measure a task at one length by sample and depth, or return the stored measurements.

    Statistics: `exact` (the whole answer is right), `accuracy` and `loss` of the answers' tokens.
    The factor `task` is the task. Tokens are scored with the true tokens before them, so an answer
    is exact if and only if greedy decoding gives it. `tokens_per_batch` bounds the input tokens of
    a batch. Raises `NormattnError` if a loss is not finite.
    """
    rows = rows_per_batch(tokens_per_batch, retrieval.length)
    identity = set_identity(model, retrieval, task=retrieval.task)

    def measure() -> pl.DataFrame:
        correct, loss = _count(scorer, retrieval, rows, model.name)
        tokens = np.tile(retrieval.scored.sum(axis=1)[:, None], (1, len(retrieval.depths)))
        statistics = {
            "exact": (correct == tokens, 1.0 * (tokens > 0)),
            "accuracy": (correct, tokens),
            "loss": (loss, tokens),
        }
        # The bootstrap's units are samples, even if several have filler from one document.
        samples = [f"{number:04d} {name}" for number, name in enumerate(retrieval.documents)]
        frames = [
            sums(name, samples, total, of, axis="depth", edges=retrieval.depths)
            for name, (total, of) in statistics.items()
        ]
        return with_identity(identity, frames)

    key = digest(identity.columns())
    return measure() if store is None else store.once(key, measure)


def _count(
    scorer: TokenScorer, retrieval: RetrievalSet, rows: int, name: str
) -> tuple[Int64[np.ndarray, "samples depths"], Float64[np.ndarray, "samples depths"]]:
    """Return the number of correct scored tokens of each window, and their summed loss."""
    samples, depths, width = retrieval.windows.shape
    windows = retrieval.windows.reshape(-1, width)
    scored = np.repeat(retrieval.scored, depths, axis=0)
    correct, loss = np.zeros(len(windows), np.int64), np.zeros(len(windows))
    for part in batches(len(windows), rows):
        mask = scored[part]
        first = int(mask.any(axis=0).argmax())
        scores = scores_from(scorer, torch.from_numpy(windows[part].astype(np.int64)), first)
        # Losses have the full length, because the rounding of a sum depends on it.
        losses = np.zeros(mask.shape)
        mask = mask[:, first:]
        losses[:, first:] = np.where(mask, scores.loss.double().cpu().numpy(), 0.0)
        if not np.isfinite(losses).all():
            raise NormattnError(
                f"{name} gives a loss that is not finite in an answer of the {retrieval.task} "
                f"windows of {retrieval.length} tokens"
            )
        correct[part] = (scores.correct.cpu().numpy() & mask).sum(axis=1)
        loss[part] = losses.sum(axis=1)
    return correct.reshape(samples, depths), loss.reshape(samples, depths)

"""Retrieval: the tokens of hidden answers, scored by sample and depth."""

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
    identity,
    rows_within,
    scores_from,
)
from normattn.lab.stats import Identity, MeasurementStore, digest, identified, sums


def evaluate_retrieval(
    scorer: TokenScorer,
    retrieval: RetrievalSet,
    whose: Identity,
    *,
    store: MeasurementStore | None = None,
    tokens_per_batch: int = 16384,
) -> pl.DataFrame:
    """Measure one task at one length by sample and depth, or return what `store` has of it.

    Statistics: `exact` (answers right as a whole), `accuracy` and `loss` of the answers' tokens;
    the factor `task` is the task.

    Every token of an answer is scored with the true tokens before it, so an answer is right as a
    whole exactly when greedy decoding would give it. `tokens_per_batch` bounds the input tokens
    scored at once (one window is the least). Raises `NormattnError` when a loss is not finite.
    """
    rows = rows_within(tokens_per_batch, retrieval.length)
    at_set = identity(whose, retrieval, task=retrieval.task)

    def measure() -> pl.DataFrame:
        correct, loss = _count(scorer, retrieval, rows, whose.name)
        tokens = np.tile(retrieval.scored.sum(axis=1)[:, None], (1, len(retrieval.depths)))
        parts = {"exact": (correct == tokens, 1.0 * (tokens > 0)), "accuracy": (correct, tokens)}
        parts["loss"] = (loss, tokens)
        # A sample is drawn as a whole, whatever document its filling is from.
        samples = [f"{number:04d} {name}" for number, name in enumerate(retrieval.documents)]
        frames = [
            sums(name, samples, above, of, axis="depth", edges=retrieval.depths)
            for name, (above, of) in parts.items()
        ]
        return identified(at_set, frames)

    key = digest(at_set.columns())
    return measure() if store is None else store.once(key, measure)


def _count(
    scorer: TokenScorer, retrieval: RetrievalSet, rows: int, name: str
) -> tuple[Int64[np.ndarray, "samples depths"], Float64[np.ndarray, "samples depths"]]:
    """Right tokens among the scored ones of each window, and their summed loss."""
    samples, depths, width = retrieval.windows.shape
    windows = retrieval.windows.reshape(-1, width)
    scored = np.repeat(retrieval.scored, depths, axis=0)
    correct, loss = np.zeros(len(windows), np.int64), np.zeros(len(windows))
    for part in batches(len(windows), rows):
        wanted = scored[part]
        first = int(wanted.any(axis=0).argmax())
        scores = scores_from(scorer, torch.from_numpy(windows[part].astype(np.int64)), first)
        # As long as the windows, because the rounding of a sum follows the places of its terms.
        losses = np.zeros(wanted.shape)
        wanted = wanted[:, first:]
        losses[:, first:] = np.where(wanted, scores.loss.double().cpu().numpy(), 0.0)
        if not np.isfinite(losses).all():
            raise NormattnError(
                f"{name} gives a loss that is not finite in an answer of the {retrieval.task} "
                f"windows of {retrieval.length} tokens"
            )
        correct[part] = (scores.correct.cpu().numpy() & wanted).sum(axis=1)
        loss[part] = losses.sum(axis=1)
    return correct.reshape(samples, depths), loss.reshape(samples, depths)

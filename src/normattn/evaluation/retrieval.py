"""One retrieval set through one scorer: the tokens of the answers, counted into one frame."""

from __future__ import annotations

import numpy as np
import polars as pl
import torch

from normattn.data.retrieval import RetrievalSet
from normattn.errors import InputError, NormattnError
from normattn.evaluation.cells import CellInfo, Progress, batches, identity
from normattn.evaluation.scorers import TokenScorer
from normattn.measure import MeasurementStore, digest, identified, sums


def evaluate_retrieval(
    scorer: TokenScorer,
    retrieval: RetrievalSet,
    cell: CellInfo,
    *,
    store: MeasurementStore | None = None,
    tokens_per_batch: int = 16384,
    progress: Progress | None = None,
) -> pl.DataFrame:
    """Measure one task at one length by sample and depth, or return what `store` has of it.

    Statistics: `exact` (answers right as a whole), `accuracy` and `loss` of the answers' tokens;
    the factor `task` is the task.

    Every token of an answer is scored with the true tokens before it, so an answer is right as a
    whole exactly when greedy decoding would give it. `tokens_per_batch` bounds the input tokens
    scored at once (one window is the least). Raises `NormattnError` when a loss is not finite.
    """
    if tokens_per_batch < 1:
        raise InputError(f"tokens_per_batch must be at least 1, got {tokens_per_batch}")
    whose = identity(cell, retrieval, task=retrieval.task)
    key = digest(whose.columns())
    done = store.get(key) if store is not None else None
    if done is not None:
        return done
    correct, loss = _count(scorer, retrieval, tokens_per_batch, progress, cell.name)
    tokens = np.tile(retrieval.scored.sum(axis=1)[:, None], (1, len(retrieval.depths)))
    parts = {"exact": (correct == tokens, 1.0 * (tokens > 0)), "accuracy": (correct, tokens)}
    parts["loss"] = (loss, tokens)
    rows = [
        sums(name, _samples(retrieval), above, of, axis="depth", edges=retrieval.depths)
        for name, (above, of) in parts.items()
    ]
    measured = identified(whose, rows)
    if store is not None:
        store.put(key, measured)
    return measured


def _samples(retrieval: RetrievalSet) -> list[str]:
    """A sample is drawn as a whole, whatever document its filling is from."""
    return [f"{number:04d} {name}" for number, name in enumerate(retrieval.documents)]


def _count(
    scorer: TokenScorer,
    retrieval: RetrievalSet,
    tokens_per_batch: int,
    progress: Progress | None,
    name: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Correct answer tokens and their summed loss, both (samples, depths)."""
    samples, depths = len(retrieval), len(retrieval.depths)
    flat = retrieval.windows.reshape(samples * depths, -1)
    correct, loss = np.zeros(len(flat), np.int64), np.zeros(len(flat))
    for rows in batches(len(flat), max(1, tokens_per_batch // retrieval.length)):
        scores = scorer(torch.from_numpy(flat[rows].astype(np.int64)))
        scored = retrieval.scored[np.arange(len(flat))[rows] // depths]
        right = scores.correct.cpu().numpy() & scored
        losses = np.where(scored, scores.loss.double().cpu().numpy(), 0.0)
        if not np.isfinite(losses).all():
            raise NormattnError(
                f"{name} gives a loss that is not finite in an answer of the {retrieval.task} "
                f"windows of {retrieval.length} tokens"
            )
        correct[rows], loss[rows] = right.sum(axis=1), losses.sum(axis=1)
        if progress is not None:
            progress(min(rows.stop, len(flat)), len(flat))
    return correct.reshape(samples, depths), loss.reshape(samples, depths)

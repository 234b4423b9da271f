"""One retrieval set through one scorer: the tokens of the answers, counted into one record."""

from __future__ import annotations

import numpy as np
import torch

from normattn.data.retrieval import RetrievalSet
from normattn.errors import InputError, NormattnError
from normattn.evaluation.cells import CellInfo, Progress, batches, cell_fields
from normattn.evaluation.records import EvaluationStore, evaluation_key, rows_of
from normattn.evaluation.scorers import TokenScorer
from normattn.reports.retrieval_record import RetrievalRecord


def evaluate_retrieval(
    scorer: TokenScorer,
    retrieval: RetrievalSet,
    cell: CellInfo,
    *,
    store: EvaluationStore | None = None,
    tokens_per_batch: int = 16384,
    progress: Progress | None = None,
) -> RetrievalRecord:
    """Evaluate one task at one length, or return its record when `store` already has it.

    Every token of an answer is scored with the true tokens before it, so an answer is right as a
    whole exactly when greedy decoding would give it. `tokens_per_batch` bounds the input tokens
    scored at once (one window is the least). Raises `NormattnError` when a loss is not finite.
    """
    if tokens_per_batch < 1:
        raise InputError(f"tokens_per_batch must be at least 1, got {tokens_per_batch}")
    data = retrieval.fingerprint
    key = evaluation_key(cell.weights, cell.spec, cell.precision, data, ())
    done = store.get(key) if store is not None else None
    if isinstance(done, RetrievalRecord):
        return done
    correct, loss = _count(scorer, retrieval, tokens_per_batch, progress, cell.name)
    tokens = np.tile(retrieval.scored.sum(axis=1)[:, None], (1, len(retrieval.depths)))
    fields = {
        **cell_fields(cell, retrieval, key),
        "task": retrieval.task,
        "depths": retrieval.depths,
        "tokens": rows_of(tokens),
        "correct": rows_of(correct),
        "loss": rows_of(loss),
    }
    record = RetrievalRecord.model_validate(fields)
    if store is not None:
        store.put(record)
    return record


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

"""Retrieval: the tokens of hidden answers, scored by sample and depth."""

from __future__ import annotations

import numpy as np
import polars as pl
import torch
from jaxtyping import Bool, Float64, Int32, Int64

from normattn.errors import InputError, NormattnError
from normattn.lab.data.retrieval import RetrievalSet
from normattn.lab.evaluation.scorer import TokenScorer, batches, identity, scores_from
from normattn.lab.stats import Identity, MeasurementStore, digest, identified, sums


def count_answers(
    scorer: TokenScorer,
    windows: Int32[np.ndarray, "n length_1"],
    scored: Bool[np.ndarray, "n length"],
    tokens_per_batch: int,
    name: str,
    task: str,
) -> tuple[Int64[np.ndarray, "n"], Float64[np.ndarray, "n"]]:
    """Right tokens among the scored ones of each window, and their summed loss.

    Every token is scored with the true tokens before it, so an answer is right as a whole exactly
    when greedy decoding would give it. `tokens_per_batch` bounds the input tokens scored at once
    (one window is the least). Raises `NormattnError` naming model and task
    when a loss is not finite.
    """
    if tokens_per_batch < 1:
        raise InputError(f"tokens_per_batch must be at least 1, got {tokens_per_batch}")
    correct, loss = np.zeros(len(windows), np.int64), np.zeros(len(windows))
    for rows in batches(len(windows), max(1, tokens_per_batch // scored.shape[1])):
        wanted = scored[rows]
        first = int(wanted.any(axis=0).argmax())
        scores = scores_from(scorer, torch.from_numpy(windows[rows].astype(np.int64)), first)
        # As long as the windows, because the rounding of a sum follows the places of its terms.
        losses = np.zeros(wanted.shape)
        wanted = wanted[:, first:]
        losses[:, first:] = np.where(wanted, scores.loss.double().cpu().numpy(), 0.0)
        if not np.isfinite(losses).all():
            raise NormattnError(
                f"{name} gives a loss that is not finite in an answer of the {task} windows of "
                f"{scored.shape[1]} tokens"
            )
        correct[rows] = (scores.correct.cpu().numpy() & wanted).sum(axis=1)
        loss[rows] = losses.sum(axis=1)
    return correct, loss


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
    at_set = identity(whose, retrieval, task=retrieval.task)
    key = digest(at_set.columns())

    def measure() -> pl.DataFrame:
        samples, depths, width = retrieval.windows.shape
        scored = np.repeat(retrieval.scored, depths, axis=0)
        flat = retrieval.windows.reshape(-1, width)
        task = retrieval.task
        counted = count_answers(scorer, flat, scored, tokens_per_batch, whose.name, task)
        correct, loss = (array.reshape(samples, depths) for array in counted)
        tokens = np.tile(retrieval.scored.sum(axis=1)[:, None], (1, len(retrieval.depths)))
        parts = {"exact": (correct == tokens, 1.0 * (tokens > 0)), "accuracy": (correct, tokens)}
        parts["loss"] = (loss, tokens)
        rows = [
            sums(name, _samples(retrieval), above, of, axis="depth", edges=retrieval.depths)
            for name, (above, of) in parts.items()
        ]
        return identified(at_set, rows)

    return measure() if store is None else store.once(key, measure)


def _samples(retrieval: RetrievalSet) -> list[str]:
    """A sample is drawn as a whole, whatever document its filling is from."""
    return [f"{number:04d} {name}" for number, name in enumerate(retrieval.documents)]

"""Answers at chosen places of windows: how many of their tokens are right, and at what loss."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int32, Int64

from normattn.errors import InputError, NormattnError
from normattn.lab.evaluation.cells import batches
from normattn.lab.evaluation.scorers import TokenScorer, scores_from


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

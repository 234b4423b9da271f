"""One retrieval set through one scorer: the tokens of the answers, counted into one frame."""

from __future__ import annotations

import numpy as np
import polars as pl

from normattn.lab.data.retrieval import RetrievalSet
from normattn.lab.evaluation.answers import count_answers
from normattn.lab.evaluation.cells import CellInfo, identity
from normattn.lab.evaluation.scorers import TokenScorer
from normattn.lab.stats import MeasurementStore, digest, identified, sums


def evaluate_retrieval(
    scorer: TokenScorer,
    retrieval: RetrievalSet,
    cell: CellInfo,
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
    whose = identity(cell, retrieval, task=retrieval.task)
    key = digest(whose.columns())

    def measure() -> pl.DataFrame:
        samples, depths, width = retrieval.windows.shape
        scored = np.repeat(retrieval.scored, depths, axis=0)
        flat = retrieval.windows.reshape(-1, width)
        task = retrieval.task
        counted = count_answers(scorer, flat, scored, tokens_per_batch, cell.name, task)
        correct, loss = (array.reshape(samples, depths) for array in counted)
        tokens = np.tile(retrieval.scored.sum(axis=1)[:, None], (1, len(retrieval.depths)))
        parts = {"exact": (correct == tokens, 1.0 * (tokens > 0)), "accuracy": (correct, tokens)}
        parts["loss"] = (loss, tokens)
        rows = [
            sums(name, _samples(retrieval), above, of, axis="depth", edges=retrieval.depths)
            for name, (above, of) in parts.items()
        ]
        return identified(whose, rows)

    return measure() if store is None else store.once(key, measure)


def _samples(retrieval: RetrievalSet) -> list[str]:
    """A sample is drawn as a whole, whatever document its filling is from."""
    return [f"{number:04d} {name}" for number, name in enumerate(retrieval.documents)]

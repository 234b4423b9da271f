"""One many-shot set through one scorer: by likelihood and by generation, into one frame."""

from __future__ import annotations

import numpy as np
import polars as pl

from normattn.lab.data.in_context import InContextSet
from normattn.lab.evaluation.answers import count_answers
from normattn.lab.evaluation.cells import CellInfo, identity
from normattn.lab.evaluation.scorers import TokenScorer
from normattn.lab.stats import MeasurementStore, digest, identified, sums


def evaluate_in_context(
    scorer: TokenScorer,
    chosen: InContextSet,
    cell: CellInfo,
    *,
    store: MeasurementStore | None = None,
    tokens_per_batch: int = 16384,
) -> pl.DataFrame:
    """Measure many-shot classification at one length, or return what `store` has of it.

    Statistics of each question, over the samples that ask it: `chosen` (by likelihood: whether the
    right answer is the likeliest of all, by the summed log-likelihood of its tokens; of k equally
    likely ones each counts 1/k), `exact` (by generation: whether greedy decoding would give the
    right answer, each of its tokens being the model's first choice), `loss` of the right answer's
    tokens, and `shots`.
    `tokens_per_batch` bounds the input tokens scored at once (one window is the least). Raises
    `NormattnError` when a loss is not finite.
    """
    whose = identity(cell, chosen)
    key = digest(whose.columns())

    def measure() -> pl.DataFrame:
        return identified(whose, _counted(scorer, chosen, tokens_per_batch, cell.name))

    return measure() if store is None else store.once(key, measure)


def _counted(
    scorer: TokenScorer,
    chosen: InContextSet,
    tokens_per_batch: int,
    name: str,
) -> list[pl.DataFrame]:
    """The statistics of each question.

    Samples of one question are no independent ones: they are added up as one unit.
    """
    flat, scored = (array.reshape(-1, array.shape[-1]) for array in (chosen.windows, chosen.scored))
    counted = count_answers(scorer, flat, scored, tokens_per_batch, name, "many-shot")
    correct, loss = (array.reshape(chosen.windows.shape[:2]) for array in counted)
    tokens, samples = chosen.scored.sum(axis=2), np.arange(len(chosen))
    right = (samples, chosen.right)
    best = loss == loss.min(axis=1, keepdims=True)
    parts = {
        "chosen": (best[right] / best.sum(axis=1), np.ones(len(chosen))),
        "exact": (correct[right] == tokens[right], np.ones(len(chosen))),
        "loss": (loss[right], tokens[right]),
        "shots": (chosen.shots, np.ones(len(chosen))),
    }
    return [sums(name, chosen.documents, *part) for name, part in parts.items()]

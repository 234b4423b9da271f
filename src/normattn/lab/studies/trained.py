"""How trainings ended, for studies that test which settings fail.

A training has *learned*, is *stuck* (less than `MARGIN` nats better than the unigram model: it
learned nothing from the context), or has *diverged* (its loss is no longer finite).
"""

from __future__ import annotations

from typing import Literal

from normattn.lab.evaluation.masked import learnt_nothing
from normattn.lab.report.view import View
from normattn.lab.stats.arrays import Where

TrainingOutcome = Literal["diverged", "stuck", "learned"]
"""From the worst to the best."""


def training_outcomes(view: View, where: Where) -> dict[int, TrainingOutcome]:
    """How the training of each seed ended, in the rows `where`; empty where none was measured.

    Each seed is judged alone, as a mean would hide one that learned nothing.
    """
    outcomes: dict[int, TrainingOutcome] = {}
    losses, unigrams = (view.sums(name, where) for name in ("loss", "unigram_loss"))
    if losses is not None and unigrams is not None:
        by_seed = (
            (sums.numerator.sum((1, 2)) / sums.denominator.sum((1, 2))).tolist()
            for sums in (losses, unigrams)
        )
        for seed, loss, unigram in zip(losses.seeds, *by_seed, strict=True):
            outcomes[seed] = "stuck" if learnt_nothing(loss, unigram) else "learned"
    diverged = view.values("seed", {**where, "protocol": "training", "statistic": "diverged"})
    return outcomes | dict.fromkeys(sorted(diverged), "diverged")

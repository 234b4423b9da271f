"""What was measured, as the tables, claims and figures of the study ask for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normattn.lab.evaluation.masked import learnt_nothing
from normattn.lab.report.view import View
from normattn.lab.stats import Estimate, Metric, select
from normattn.lab.stats.arrays import Where
from normattn.lab.stats.metrics import accuracy, loss
from normattn.lab.studies.base import ranked
from normattn.lab.studies.qknorm.rows import CLIP, parts
from normattn.lab.studies.qknorm.settings import SCORES
from normattn.lab.studies.qknorm.translation import RATES

BASE = "Baseline"
LOSS, ACCURACY = loss(), accuracy()
IMAGE_ACCURACY = Metric("accuracy", "accuracy", ACCURACY.value, "%", 2)
IMAGE_LOSS = loss(digits=4)
UNIGRAM = loss("unigram baseline", "unigram_loss")


def rows_of(experiment: str, score: str, rate: float | None = None) -> dict[str, Any]:
    """Where the tested models of a score are; `rate` is the multiple of the learning rate."""
    at = {} if rate is None else {"factor.rate": rate}
    return {"row": score, "protocol": experiment, "factor.experiment": experiment, **at}


def training(where: Where) -> dict[str, Any]:
    """Where the trainings of these models are."""
    return {**where, "protocol": "training"}


def scores(view: View, experiment: str) -> list[str]:
    """The scores of an experiment, in the order of the table; diverged ones too."""
    return ranked(view.values("row", {"factor.experiment": experiment}), SCORES)


def base_of(row: str) -> str:
    """What a row is compared with in the sweep: Baseline by the same optimiser, without QK-Clip."""
    _, others = parts(row)
    return "+".join((BASE, *(other for other in others if other != CLIP)))


def multiples(view: View, experiment: str, score: str | None = None) -> list[float]:
    """The multiples of the learning rate of an experiment, or of one score in it, rising."""
    row = {} if score is None else {"row": score}
    return sorted(view.values("factor.rate", {"factor.experiment": experiment, **row}))


def as_multiple(rate: float) -> str:
    """ "×4"."""
    return f"×{rate:g}"


def diverged(view: View, where: Where) -> list[tuple[int, int]]:
    """(seed, step) of each training of these models that ended in NaN."""
    rows = select(view.frame, {**training(where), "statistic": "diverged"})
    return sorted((seed, int(step)) for seed, step in rows.select("seed", "bin").rows())


def failures(view: View, where: Where) -> dict[int, bool]:
    """Of every seed whether its training failed: in NaN, or hardly better than unigrams."""
    failed = {seed: True for seed, _ in diverged(view, where)}
    ours, guess = view.estimate(LOSS, where), view.estimate(UNIGRAM, where)
    if ours is not None and guess is not None:
        for seed, value, of in zip(ours.seeds, ours.per_seed, guess.per_seed, strict=True):
            failed[seed] = learnt_nothing(value, of)
    return failed


def tolerated(view: View, score: str) -> float | None:
    """The highest multiple up to which no training of a score failed; None where the first did.

    A multiple whose trainings have not been tested, nor ended in NaN, is not known to be tolerated.
    """
    reached = None
    for rate in multiples(view, RATES, score):
        failed = failures(view, rows_of(RATES, score, rate))
        if not failed or any(failed.values()):
            break
        reached = rate
    return reached


def unigram(view: View) -> float | None:
    """The loss of guessing each word of the sweep's test set by its frequency."""
    losses = [
        value.value
        for score in scores(view, RATES)
        for rate in multiples(view, RATES, score)
        if (value := view.estimate(UNIGRAM, rows_of(RATES, score, rate))) is not None
    ]
    return min(losses, default=None)


def largest_logit(view: View, where: Where) -> Estimate | None:
    """The largest logit of any recorded step and seed."""
    logits = _steps(view, "largest_logit", where)
    return _of_seeds({seed: float(values.max()) for seed, values in logits.items()}, max)


def last_entropy(view: View, where: Where) -> Estimate | None:
    """The entropy share at the last recorded step, the mean over the seeds."""
    shares = _steps(view, "entropy_share", where)
    last = {seed: float(values[-1]) for seed, values in shares.items()}
    return _of_seeds(last, lambda values: sum(values) / len(values))


def _steps(view: View, statistic: str, where: Where) -> dict[int, NDArray[np.float64]]:
    """A recorded quantity of every seed by step; one that diverged has fewer steps."""
    recorded = {}
    for seed in sorted(view.values("seed", {**training(where), "statistic": statistic})):
        sums = view.sums(statistic, {**training(where), "seed": seed})
        assert sums is not None
        recorded[seed] = (sums.numerator / sums.denominator)[0, 0]
    return recorded


def _of_seeds(
    values: Mapping[int, float], combined: Callable[[Sequence[float]], float]
) -> Estimate | None:
    if not values:
        return None
    per_seed = tuple(values.values())
    return Estimate(combined(per_seed), seeds=tuple(values), per_seed=per_seed)

"""The claims and figures of the QK-Norm study, and where its measurements are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normattn.lab.evaluation.masked import learnt_nothing
from normattn.lab.report.claims import SEEDS, Claim
from normattn.lab.report.figures import (
    Curves,
    Figure,
    IntervalColumn,
    Intervals,
    Line,
    Panel,
    Point,
)
from normattn.lab.report.view import View, points, step_points
from normattn.lab.stats import Estimate, Metric, sign_test
from normattn.lab.stats.arrays import Where
from normattn.lab.stats.metrics import BLEU, accuracy, loss
from normattn.lab.studies.lm_report import ranked
from normattn.lab.studies.qknorm_runs import (
    CLIP,
    IMAGES,
    RATES,
    SCORES,
    TRANSLATION,
    parts,
)

# What was measured

BASE = "Baseline"
LOSS, ACCURACY = loss(), accuracy()
IMAGE_ACCURACY = Metric("accuracy", "accuracy", ACCURACY.value, "%", 2)
IMAGE_LOSS = loss(digits=4)
UNIGRAM = loss("unigram baseline", "unigram_loss")


def at(experiment: str, score: str, rate: float | None = None) -> dict[str, Any]:
    """Where the tested models of a score are; `rate` is the multiple of the learning rate."""
    rated = {} if rate is None else {"factor.rate": rate}
    return {"row": score, "protocol": experiment, "factor.experiment": experiment, **rated}


def training_of(where: Where) -> dict[str, Any]:
    """Where the trainings of these models are."""
    return {**where, "protocol": "training"}


def scores(view: View, experiment: str) -> list[str]:
    """The scores of an experiment, in the order of the table; diverged ones too."""
    return ranked(view.values("row", {"factor.experiment": experiment}), SCORES)


def multiples(view: View, experiment: str, score: str | None = None) -> list[float]:
    """The multiples of the learning rate of an experiment, or of one score in it, rising."""
    row = {} if score is None else {"row": score}
    return sorted(view.values("factor.rate", {"factor.experiment": experiment, **row}))


def base_of(row: str) -> str:
    """What a row is compared with in the sweep: Baseline by the same optimiser, without QK-Clip."""
    return "+".join((BASE, *(other for other in parts(row)[1] if other != CLIP)))


def diverged(view: View, where: Where) -> list[tuple[int, int]]:
    """(seed, step) of each training of these models that ended in NaN."""
    ended = {**training_of(where), "statistic": "diverged"}
    seeds = sorted(view.values("seed", ended))
    return [(seed, int(view.values("bin", {**ended, "seed": seed})[0])) for seed in seeds]


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
        failed = failures(view, at(RATES, score, rate))
        if not failed or any(failed.values()):
            break
        reached = rate
    return reached


def by_rate(view: View, metric: Metric, score: str) -> dict[float, float]:
    """A metric of one score of the sweep by the multiple of the learning rate."""
    rated = {rate: at(RATES, score, rate) for rate in multiples(view, RATES, score)}
    known = ((rate, view.estimate(metric, where)) for rate, where in rated.items())
    return {rate: estimate.value for rate, estimate in known if estimate is not None}


def unigram(view: View) -> float | None:
    """The loss of guessing each word of the sweep's test set by its frequency."""
    every = (by_rate(view, UNIGRAM, score).values() for score in scores(view, RATES))
    return min((value for values in every for value in values), default=None)


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
    for seed in sorted(view.values("seed", {**training_of(where), "statistic": statistic})):
        measured = view.sums(statistic, {**training_of(where), "seed": seed})
        assert measured is not None
        recorded[seed] = (measured.numerator / measured.denominator)[0, 0]
    return recorded


def _of_seeds(
    values: Mapping[int, float], combined: Callable[[Sequence[float]], float]
) -> Estimate | None:
    if not values:
        return None
    per_seed = tuple(values.values())
    return Estimate(combined(per_seed), seeds=tuple(values), per_seed=per_seed)


# Claims

CLAIMED = ("QKLayerNorm", "QKRMSNorm", "QKNorm2020")
"""The norms of both sides that the source's sentence speaks of; QKNorm2020 is its own form."""
TRANSLATES, STABLE, BOUNDED = "arXiv 2010.04245", "arXiv 2302.05442", "arXiv 2507.20534"
CLIPPED = (("Baseline+QK-Clip", "QKRMSNorm"), ("Baseline+Muon+QK-Clip", "QKRMSNorm+Muon"))
"""Does clipping do what normalising does? The rows that say it, by AdamW and by Muon."""


def claims(view: View) -> Iterator[Claim]:
    """Better translations; tolerance to high learning rates; QK-Clip instead of a norm."""
    for score in CLAIMED:
        said = f"{score} translates better than {BASE}"
        yield _against(said, TRANSLATES, BLEU, score, BASE, TRANSLATION)
        said = f"{score} has a lower loss than {BASE}"
        yield _against(said, TRANSLATES, LOSS, score, BASE, TRANSLATION, sign=-1)
    for experiment, metric, sign, words in (
        (RATES, LOSS, -1, "has a lower loss"),
        (IMAGES, IMAGE_ACCURACY, 1, "is more accurate on images"),
    ):
        high = max(multiples(view, experiment), default=1.0)
        for score in scores(view, experiment) if high > 1 else ():
            if score != (base := base_of(score)):
                said = f"{score} at ×{high:g} of the learning rate {words} than {base}"
                yield _against(said, _source(score), metric, score, base, experiment, high, sign)
    for score in scores(view, RATES):
        if score != (base := base_of(score)):
            yield _fails_less(
                f"fewer trainings fail with {score} than with {base} in the learning-rate sweep",
                _source(score),
                *(score, base),
            )
    high = max(multiples(view, RATES), default=1.0)
    for clipped, normed in CLIPPED:
        yield _fails_less(
            f"{clipped} tolerates as high a learning rate as {normed} "
            "(at least no worse: the difference is not below 0)",
            "asked here",
            *(clipped, normed),
        )
        for experiment, rate in ((RATES, high), (TRANSLATION, None)):
            rated = "" if rate is None else f"at ×{rate:g} of the learning rate "
            said = f"{clipped} {rated}ends at as good a loss as {normed} "
            said += "(at least no worse: the difference is not above 0)"
            yield _against(said, "asked here", LOSS, clipped, normed, experiment, rate, sign=-1)


def _source(row: str) -> str:
    return BOUNDED if CLIP in row else STABLE


def _against(
    sentence: str,
    source: str,
    metric: Metric,
    score: str,
    base: str,
    experiment: str,
    rate: float | None = None,
    sign: int = 1,
) -> Claim:
    """A score minus another in the same experiment, at the same learning rate."""
    rated = "" if rate is None else f" at ×{rate:g}"
    ours, theirs = (metric.at(at(experiment, row, rate)) for row in (score, base))
    measured = f"{score} − {base}{rated}, {metric.title}"
    return Claim(sentence, ours - theirs, source, measured, sign)


def _fails_less(sentence: str, source: str, score: str, than: str) -> Claim:
    """An exact sign test over the sweep's trainings, which were chosen and not drawn.

    Trainings of one seed at several rates are alike: with fewer than `SEEDS` there is no p.
    """

    def test(view: View) -> Estimate | None:
        only_base = only_score = pairs = 0
        seeds: set[int] = set()
        for rate in multiples(view, RATES, score):
            ours = failures(view, at(RATES, score, rate))
            base = failures(view, at(RATES, than, rate))
            for seed in ours.keys() & base.keys():
                only_base += base[seed] and not ours[seed]
                only_score += ours[seed] and not base[seed]
                pairs += 1
                seeds.add(seed)
        if not pairs:
            return None
        return Estimate(
            float(only_base - only_score),
            p=sign_test(only_base, only_score) if len(seeds) >= SEEDS else None,
            units=pairs,
            seeds=tuple(sorted(seeds)),
        )

    measured = f"trainings in which only {than} fails − only {score} (exact sign test)"
    return Claim(sentence, None, source, measured, test=test, digits=0)


# Figures

OF_RATE = "learning rate, in units of the preset's"


def figures(view: View) -> list[Figure]:
    """Scores by their results, results by learning rate, logits and entropy by step."""
    losses = _lines_by_rate(view, RATES, LOSS)
    guess = unigram(view)
    if guess is not None:
        level = tuple(Point(rate, guess) for rate in multiples(view, RATES))
        losses = (*losses, Line("unigram baseline", level, dashed=True))
    trained = tuple(
        Line(score, steps, score)
        for score in scores(view, TRANSLATION)
        if (steps := step_points(view, "loss", training_of(at(TRANSLATION, score))))
    )
    seen = _lines_by_rate(view, IMAGES, IMAGE_ACCURACY)
    return [
        _by_score(view, "bleu_by_score", "Translation by score", TRANSLATION, (BLEU, LOSS)),
        Curves(
            *("loss_by_learning_rate", "Test loss by learning rate"),
            (Panel("after training", losses, OF_RATE, "test loss (nats per token)", log_x=True),),
        ),
        _by_step(view, "largest_logit", "largest_logit", "largest logit", log=True),
        _by_step(view, "entropy_share", "attention_entropy", "entropy / ln n", log=False),
        Curves(
            *("training_loss", "Training loss; bands: all seeds"),
            (Panel("", trained, "training step", "training loss (nats per token)"),),
        ),
        _by_score(view, "vision_by_score", "Images by score", IMAGES, (IMAGE_ACCURACY, IMAGE_LOSS)),
        Curves(
            *("vision_by_learning_rate", "Images: accuracy by learning rate"),
            (Panel("after training", seen, OF_RATE, "accuracy (%)", log_x=True),),
        ),
    ]


def _by_score(
    view: View, name: str, title: str, experiment: str, metrics: tuple[Metric, ...]
) -> Figure:
    """Every score at the preset's learning rate; of fewer than two there is nothing to compare."""
    rows = [
        score
        for score in scores(view, experiment)
        if view.sums(LOSS.name, at(experiment, score, 1.0)) is not None
    ]
    columns = tuple(
        IntervalColumn(
            f"{metric.title} ({metric.unit})" if metric.unit else metric.title,
            tuple(view.estimate(metric, at(experiment, score, 1.0)) for score in rows),
        )
        for metric in metrics
    )
    return Intervals(name, title, tuple(rows), columns if len(rows) > 1 else ())


def _lines_by_rate(view: View, experiment: str, metric: Metric) -> tuple[Line, ...]:
    """A line for every score trained at several rates; no point where every seed ended in NaN."""
    lines = []
    for score in scores(view, experiment):
        rates = multiples(view, experiment, score)
        plotted = points(view, metric, ((x, at(experiment, score, x)) for x in rates))
        if len(rates) > 1 and plotted:
            lines.append(Line(score, plotted, score))
    return tuple(lines)


def _by_step(view: View, statistic: str, name: str, title: str, log: bool) -> Figure:
    """A panel for every rate; a line ends where the last training ended."""
    panels = []
    for rate in multiples(view, RATES):
        lines = tuple(
            Line(score, steps, score)
            for score in scores(view, RATES)
            if (steps := step_points(view, statistic, training_of(at(RATES, score, rate))))
        )
        if lines:
            rated = f"learning rate ×{rate:g}"
            panels.append(Panel(rated, lines, "training step", title, log_y=log))
    whole = f"{title[0].upper()}{title[1:]} while training, by learning rate; bands: all seeds"
    return Curves(name, whole, tuple(panels))

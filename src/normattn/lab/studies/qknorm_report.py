"""The metrics, claims and figures of the QK-Norm study."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
from normattn.lab.report.tables import Row
from normattn.lab.report.view import View, points
from normattn.lab.stats import Estimate, Metric, select, sign_test
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
from normattn.lab.studies.trained import ends, step_lines

BASE = "Baseline"
# Metrics

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


def failures(view: View, where: Where) -> dict[int, bool]:
    """Of every seed whether its training diverged or learned nothing."""
    return {seed: end != "learned" for seed, end in ends(view, where).items()}


def unigram(view: View) -> float | None:
    """The loss of guessing each word of the sweep's test set by its frequency."""
    places = (
        at(RATES, score, rate)
        for score in scores(view, RATES)
        for rate in multiples(view, RATES, score)
    )
    found = (view.estimate(UNIGRAM, where) for where in places)
    return min((each.value for each in found if each is not None), default=None)


def largest_logit(view: View, row: Row) -> Estimate | None:
    """The largest logit of any recorded step and seed."""
    by_seed = {seed: max(v) for seed, v in _recorded(view, "largest_logit", row).items()}
    return _of_seeds(by_seed, max(by_seed.values(), default=0.0))


def last_entropy(view: View, row: Row) -> Estimate | None:
    """The entropy share at the last recorded step, the mean over the seeds."""
    by_seed = {seed: v[-1] for seed, v in _recorded(view, "entropy_share", row).items()}
    return _of_seeds(by_seed, sum(by_seed.values()) / max(1, len(by_seed)))


def _recorded(view: View, statistic: str, row: Row) -> dict[int, list[float]]:
    """What the training of every seed recorded, by step; one that diverged has fewer steps."""
    chosen = select(view.frame, {**training_of(row.where), "statistic": statistic})
    by_seed: dict[int, list[float]] = {}
    for seed, above, below in chosen.sort("seed", "bin").select("seed", "sum", "of").rows():
        by_seed.setdefault(seed, []).append(above / below)
    return by_seed


def _of_seeds(by_seed: Mapping[int, float], value: float) -> Estimate | None:
    if not by_seed:
        return None
    return Estimate(value, seeds=tuple(by_seed), per_seed=tuple(by_seed.values()))


# Claims

CLAIMED = ("QKLayerNorm", "QKRMSNorm", "QKNorm2020")
"""The norms of both sides that the source's sentence speaks of; QKNorm2020 is its own form."""
TRANSLATES, STABLE, BOUNDED = "arXiv 2010.04245", "arXiv 2302.05442", "arXiv 2507.20534"
CLIPPED = (("Baseline+QK-Clip", "QKRMSNorm"), ("Baseline+Muon+QK-Clip", "QKRMSNorm+Muon"))
"""Does clipping do what normalising does? The rows that say it, by AdamW and by Muon."""


def claims(view: View) -> Iterator[Claim]:
    """Better translations; tolerance to high learning rates; QK-Clip instead of a norm."""
    for score in CLAIMED:
        sentence = f"{score} translates better than {BASE}"
        yield _against(sentence, TRANSLATES, BLEU, score, BASE, TRANSLATION)
        sentence = f"{score} has a lower loss than {BASE}"
        yield _against(sentence, TRANSLATES, LOSS, score, BASE, TRANSLATION, sign=-1)
    for experiment, metric, sign, words in (
        (RATES, LOSS, -1, "has a lower loss"),
        (IMAGES, IMAGE_ACCURACY, 1, "is more accurate on images"),
    ):
        high = max(multiples(view, experiment), default=1.0)
        for score in scores(view, experiment) if high > 1 else ():
            if score != (base := base_of(score)):
                sentence = f"{score} at ×{high:g} of the learning rate {words} than {base}"
                yield _against(
                    sentence, _source(score), metric, score, base, experiment, high, sign
                )
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
            sentence = f"{clipped} {rated}ends at as good a loss as {normed} "
            sentence += "(at least no worse: the difference is not above 0)"
            yield _against(sentence, "asked here", LOSS, clipped, normed, experiment, rate, sign=-1)


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
    seen = _lines_by_rate(view, IMAGES, IMAGE_ACCURACY)
    return [
        _by_score(view, "bleu_by_score", "Translation by score", TRANSLATION, (BLEU, LOSS)),
        Curves(
            *("loss_by_learning_rate", "Test loss by learning rate"),
            (Panel("after training", losses, OF_RATE, "test loss (nats per token)", log_x=True),),
        ),
        _by_step(view, "largest_logit", "largest_logit", "largest logit", log=True),
        _by_step(view, "entropy_share", "attention_entropy", "entropy / ln n", log=False),
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
        rows = {row: training_of(at(RATES, row, rate)) for row in scores(view, RATES)}
        lines = step_lines(view, statistic, rows)
        if lines:
            rated = f"learning rate ×{rate:g}"
            panels.append(Panel(rated, lines, "training step", title, log_y=log))
    whole = f"{title[0].upper()}{title[1:]} while training, by learning rate; bands: all seeds"
    return Curves(name, whole, tuple(panels))

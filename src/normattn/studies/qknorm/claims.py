"""What the sources say of QK-Norm, each sentence with the difference that tests it."""

from __future__ import annotations

from normattn.measure import Estimate, sign_test
from normattn.measure.statistic import BLEU, Statistic
from normattn.report.claim import SEEDS, Claim, difference
from normattn.report.view import View
from normattn.studies.qknorm.images import IMAGES
from normattn.studies.qknorm.measured import (
    BASE,
    IMAGE_ACCURACY,
    LOSS,
    as_multiple,
    failures,
    multiples,
    place,
    scores,
)
from normattn.studies.qknorm.translation import RATES, TRANSLATION

TRANSLATES = "arXiv 2010.04245"
STABLE = "arXiv 2302.05442"
CLAIMED = ("QKLayerNorm", "QKRMSNorm", "QKNorm2020")
"""The norms of both sides that the first source and its followers use."""


def claims(view: View) -> list[Claim]:
    """Better translations; tolerance to high learning rates in translation and in images."""
    found = []
    for score in CLAIMED:
        found.append(_against("translates better than", TRANSLATES, BLEU, score, TRANSLATION))
        said = "has a lower loss than"
        found.append(_against(said, TRANSLATES, LOSS, score, TRANSLATION, sign=-1))
    for experiment, statistic, sign, words in (
        (RATES, LOSS, -1, "has a lower loss"),
        (IMAGES, IMAGE_ACCURACY, 1, "is more accurate on images"),
    ):
        high = max(multiples(view, experiment), default=1.0)
        for score in scores(view, experiment):
            if score != BASE and high > 1:
                said = f"at {as_multiple(high)} of the learning rate {words} than"
                found.append(_against(said, STABLE, statistic, score, experiment, high, sign))
    for score in scores(view, RATES):
        if score != BASE:
            found.append(_fails_less(score))
    return found


def _against(
    says: str,
    source: str,
    statistic: Statistic,
    score: str,
    experiment: str,
    rate: float | None = None,
    sign: int = 1,
) -> Claim:
    """A score minus Baseline in the same experiment, at the same learning rate."""
    at = "" if rate is None else f" at {as_multiple(rate)}"
    measured = f"{score} − {BASE}{at}, {statistic.title}"
    places = (place(experiment, each, rate) for each in (score, BASE))
    return difference(f"{score} {says} {BASE}", source, measured, statistic, *places, sign=sign)


def _fails_less(score: str) -> Claim:
    """An exact sign test over the sweep's trainings, which were chosen and not drawn.

    Trainings of one seed at several rates are alike: with fewer than `SEEDS` there is no p.
    """

    def test(view: View) -> Estimate | None:
        only_base = only_score = pairs = 0
        seeds: set[int] = set()
        for rate in multiples(view, RATES, score):
            ours = failures(view, place(RATES, score, rate))
            base = failures(view, place(RATES, BASE, rate))
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

    return Claim(
        f"fewer trainings fail with {score} than with {BASE} in the learning-rate sweep",
        STABLE,
        f"trainings in which only {BASE} fails − only {score} (exact sign test)",
        test=test,
        digits=0,
    )

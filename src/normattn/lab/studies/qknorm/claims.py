"""What the sources say of QK-Norm, each sentence with the difference that tests it."""

from __future__ import annotations

from collections.abc import Iterator

from normattn.lab.report.claim import SEEDS, Claim
from normattn.lab.report.view import View
from normattn.lab.stats import Estimate, Metric, sign_test
from normattn.lab.stats.metrics import BLEU
from normattn.lab.studies.qknorm.images import IMAGES
from normattn.lab.studies.qknorm.measured import (
    BASE,
    IMAGE_ACCURACY,
    LOSS,
    as_multiple,
    base_of,
    failures,
    multiples,
    rows_of,
    scores,
)
from normattn.lab.studies.qknorm.rows import CLIP
from normattn.lab.studies.qknorm.translation import RATES, TRANSLATION

TRANSLATES = "arXiv 2010.04245"
STABLE = "arXiv 2302.05442"
BOUNDED = "arXiv 2507.20534"
HERE = "asked here"
CLAIMED = ("QKLayerNorm", "QKRMSNorm", "QKNorm2020")
"""The norms of both sides that the first source and its followers use."""
CLIPPED = (("Baseline+QK-Clip", "QKRMSNorm"), ("Baseline+Muon+QK-Clip", "QKRMSNorm+Muon"))
"""Does clipping do what normalising does? The rows that say it, by AdamW and by Muon."""


def claims(view: View) -> list[Claim]:
    """Better translations; tolerance to high learning rates; QK-Clip instead of a norm."""
    all_claims = []
    for score in CLAIMED:
        all_claims.append(_against("translates better than", TRANSLATES, BLEU, score, TRANSLATION))
        said = "has a lower loss than"
        all_claims.append(_against(said, TRANSLATES, LOSS, score, TRANSLATION, sign=-1))
    for experiment, statistic, sign, words in (
        (RATES, LOSS, -1, "has a lower loss"),
        (IMAGES, IMAGE_ACCURACY, 1, "is more accurate on images"),
    ):
        high = max(multiples(view, experiment), default=1.0)
        for score in scores(view, experiment):
            base = base_of(score)
            if score != base and high > 1:
                said = f"at {as_multiple(high)} of the learning rate {words} than"
                source = _source(score)
                all_claims.append(
                    _against(said, source, statistic, score, experiment, high, sign, base)
                )
    for score in scores(view, RATES):
        if score != (base := base_of(score)):
            sentence = (
                f"fewer trainings fail with {score} than with {base} in the learning-rate sweep"
            )
            all_claims.append(_fails_less(sentence, _source(score), score, base))
    return [*all_claims, *_clipped(view)]


def _source(row: str) -> str:
    return BOUNDED if CLIP in row else STABLE


def _clipped(view: View) -> Iterator[Claim]:
    """QK-Clip against QKRMSNorm: the rates it tolerates, and the loss it ends at."""
    high = max(multiples(view, RATES), default=1.0)
    as_good = "ends at as good a loss as"
    not_above = "(at least no worse: the difference is not above 0)"
    for clipped, normed in CLIPPED:
        sentence = (
            f"{clipped} tolerates as high a learning rate as {normed} "
            "(at least no worse: the difference is not below 0)"
        )
        yield _fails_less(sentence, HERE, clipped, normed)
        for experiment, rate in ((RATES, high), (TRANSLATION, None)):
            at = "" if rate is None else f"at {as_multiple(rate)} of the learning rate "
            ours, theirs = (LOSS.at(rows_of(experiment, row, rate)) for row in (clipped, normed))
            yield Claim(
                f"{clipped} {at}{as_good} {normed} {not_above}",
                ours - theirs,
                *(HERE, _measured(clipped, normed, rate, LOSS), -1),
            )


def _measured(ours: str, theirs: str, rate: float | None, statistic: Metric) -> str:
    at = "" if rate is None else f" at {as_multiple(rate)}"
    return f"{ours} − {theirs}{at}, {statistic.title}"


def _against(
    says: str,
    source: str,
    statistic: Metric,
    score: str,
    experiment: str,
    rate: float | None = None,
    sign: int = 1,
    base: str = BASE,
) -> Claim:
    """A score minus Baseline in the same experiment, at the same learning rate."""
    measured = _measured(score, base, rate, statistic)
    ours, theirs = (statistic.at(rows_of(experiment, row, rate)) for row in (score, base))
    return Claim(f"{score} {says} {base}", ours - theirs, source, measured, sign)


def _fails_less(sentence: str, source: str, score: str, than: str) -> Claim:
    """An exact sign test over the sweep's trainings, which were chosen and not drawn.

    Trainings of one seed at several rates are alike: with fewer than `SEEDS` there is no p.
    """

    def test(view: View) -> Estimate | None:
        only_base = only_score = pairs = 0
        seeds: set[int] = set()
        for rate in multiples(view, RATES, score):
            ours = failures(view, rows_of(RATES, score, rate))
            base = failures(view, rows_of(RATES, than, rate))
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
        sentence,
        None,
        source,
        f"trainings in which only {than} fails − only {score} (exact sign test)",
        test=test,
        digits=0,
    )

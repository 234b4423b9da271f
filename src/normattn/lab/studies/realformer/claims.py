"""What the sources say of RealFormer, or what follows if they are right, and what tests it.

Sources: the paper (arXiv 2012.11747), the post (kexue.fm/archives/8027), and for PreLN and PostLN
arXiv 2002.04745. "Asked here": no sentence of theirs, but a test of one (if attention converges
with depth, sharing layers should cost less). Training's stability is about settings, which are
chosen and not drawn: there an exact sign test over the settings decides.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import reduce
from typing import NamedTuple, TypeVar

from normattn.lab.report.claim import Claim
from normattn.lab.report.view import View
from normattn.lab.stats import Estimate, Metric, sign_test
from normattn.lab.stats.metrics import mean_of_bins
from normattn.lab.studies.realformer.reading import (
    BY_LAYER,
    LOSS,
    POINTS,
    POSTLN,
    PRELN,
    REALFORMER,
    Outcome,
    Setting,
    by_setting,
    depth,
    grid,
    layers,
    masked,
    sizes,
)

PAPER, POST, XIONG = "arXiv 2012.11747", "kexue 8027", "arXiv 2002.04745"
OPEN, HERE = "left open in kexue 8027", "asked here"
COMMENTS = "asked in kexue 8027's comments"
SHARED = "-shared"

MATTERS = 1.0
"""Points of accuracy that would matter: wider intervals are inconclusive."""

_BETTER = "RealFormer is better than PostLN and PreLN at equal steps"
_REZERO = "RealFormer is better than ReZero"


class Compared(NamedTuple):
    """Of two rows of one size the first is said to be more accurate, or less so by no `margin`."""

    sentence: str
    source: str
    ours: str
    theirs: str
    margin: float = 0.0


COMPARED = (
    Compared(_BETTER, PAPER, REALFORMER, POSTLN),
    Compared(_BETTER, PAPER, REALFORMER, PRELN),
    Compared(
        f"PostLN is at least as good as PreLN (less than {MATTERS:.0f} point worse)",
        *(POST, POSTLN, PRELN),
        margin=MATTERS,
    ),
    Compared(
        "with half the steps RealFormer is better than PostLN with all of them "
        "(said of downstream scores; tested here on hidden tokens)",
        *(PAPER, "RealFormer-half", POSTLN),
    ),
    Compared(_REZERO, OPEN, REALFORMER, "ReZero"),
    Compared(f"{_REZERO} without norms", OPEN, REALFORMER, "ReZeroNoNorm"),
    Compared("residual scores help under PreLN too", HERE, "RealFormer-PreLN", PRELN),
    Compared("residual scores are better than residual q and k", HERE, REALFORMER, "ResidualQK"),
    Compared("residual values help beside residual q and k", COMMENTS, "ResidualQKV", "ResidualQK"),
    Compared(
        "residual scores are better than residual q, k and v",
        *(COMMENTS, REALFORMER, "ResidualQKV"),
    ),
    Compared(
        "a trained PostLN gains more by going on as RealFormer than as it is",
        *(COMMENTS, "RealFormer-from-PostLN", "PostLN-continued"),
    ),
)


def claims(view: View) -> list[Claim]:
    """Every claim that the table, the layers and the grid can test, in the order of the page."""
    every = sizes(view)
    all_claims = [
        Claim(
            pair.sentence,
            POINTS.at(masked(pair.ours, size)) - POINTS.at(masked(pair.theirs, size)),
            pair.source,
            f"{size}: {pair.ours} − {pair.theirs}, accuracy in points",
            matters=MATTERS,
            margin=pair.margin,
        )
        for pair in COMPARED
        for size in every
    ]
    all_claims += _by_size(every)
    all_claims += [_shared(size) for size in every]
    all_claims += _stability(grid(view))
    for size in every:
        if (count := layers(view, size)) > 1:
            all_claims += _of_layers(size, count)
    order = list(dict.fromkeys(claim.sentence for claim in all_claims))
    return sorted(all_claims, key=lambda claim: order.index(claim.sentence))


def _by_size(every: list[str]) -> Iterator[Claim]:
    """What the largest size adds to the smallest, with RealFormer and without."""
    if len(every) < 2:
        return
    small, large = every[0], every[-1]
    for other in (POSTLN, PRELN):
        gain, others = (
            POINTS.at(masked(row, large)) - POINTS.at(masked(row, small))
            for row in (REALFORMER, other)
        )
        yield Claim(
            "a larger model pays off with RealFormer more than without",
            gain - others,
            *(POST, f"{small} → {large}: RealFormer's gain − {other}'s, accuracy in points"),
            matters=MATTERS,
        )


def _shared(size: str) -> Claim:
    gain, others = (
        POINTS.at(masked(row + SHARED, size)) - POINTS.at(masked(row, size))
        for row in (REALFORMER, POSTLN)
    )
    return Claim(
        "sharing one block among all layers costs RealFormer less",
        gain - others,
        *(HERE, f"{size}: RealFormer − PostLN, points gained by sharing (negative: lost)"),
        matters=MATTERS,
    )


def sum_of(metrics: Iterable[Metric]) -> Metric:
    """The sum of some metrics."""
    return reduce(operator.add, metrics)


_BOTH = ((REALFORMER, 1.0), (POSTLN, -1.0))
_STATISTICS = {statistic.name: replace(statistic, digits=2) for statistic in BY_LAYER}


def _of_layers(size: str, count: int) -> Iterator[Claim]:
    """What is said of the layers of models of `count` layers."""
    # Layer 1 has none below it: of `count` − 1 agreements the upper half counts.
    upper, half = slice((count - 1) // 2, None), count // 2
    yield _means(
        "RealFormer's attention is sparser: its entropy is lower",
        *(PAPER, size, "entropy", "entropy in nats, mean over layers"),
        sign=-1,
    )
    for name, words in (("agreement", "head by head"), ("agreement_mean", "of mean heads")):
        yield _means(
            "attention of neighbouring layers agrees more, so that it converges",
            *(POST, size, name, f"agreement {words}, upper half"),
            bins=upper,
        )
    yield _ends(
        "RealFormer's attention tends to one-hot with depth",
        *(POST, size, "entropy", "RealFormer, entropy in nats, last − first layer"),
        rows=((REALFORMER, 1.0),),
        sign=-1,
    )
    yield _ends(
        "leaving at half depth costs RealFormer less (models of adaptive depth, as FastBERT)",
        *(POST, size, "exit_accuracy"),
        f"RealFormer − PostLN, points lost by leaving after layer {half} of {count}",
        rows=_BOTH,
        first=half - 1,
        sign=-1,
    )
    yield _ends(
        "PreLN's residual stream grows with depth",
        *(XIONG, size, "variance", "PreLN, variance, last − first layer"),
        rows=((PRELN, 1.0),),
        first=1,  # Place 0 is what the first layer reads.
    )
    yield _ends(
        "before training, PostLN's gradient is larger at the top than at the bottom",
        *(XIONG, size, "gradients_start", "PostLN, gradient norm, top − bottom layer"),
        rows=((POSTLN, 1.0),),
    )
    yield _ends(
        "residual scores bring the gradients of top and bottom closer together",
        *(POST, size, "gradients_start"),
        "RealFormer − PostLN, gradient norm before training, top − bottom layer",
        rows=_BOTH,
        sign=-1,
    )


def _means(
    sentence: str,
    source: str,
    size: str,
    name: str,
    words: str,
    bins: slice | None = None,
    sign: int = 1,
) -> Claim:
    """RealFormer − PostLN, the mean over layers."""
    metric = replace(_STATISTICS[name], value=mean_of_bins)
    metric = metric if bins is None else metric.between(bins)
    ours, theirs = (metric.at(depth(row, size)) for row in (REALFORMER, POSTLN))
    measured = f"{size}: RealFormer − PostLN, {words}"
    return Claim(sentence, ours - theirs, source, measured, sign)


def _ends(
    sentence: str,
    source: str,
    size: str,
    name: str,
    words: str,
    rows: tuple[tuple[str, float], ...],
    first: int = 0,
    sign: int = 1,
) -> Claim:
    """Σ factor · (the last layer − the one at place `first`) over `rows`."""
    metric = _STATISTICS[name]
    ends = metric.between([-1]) - metric.between([first])
    whole = sum_of(factor * ends.at(depth(row, size)) for row, factor in rows)
    return Claim(sentence, whole, source, f"{size}: {words}", sign)


def _stability(outcomes: Mapping[Setting, Outcome]) -> Iterator[Claim]:
    """Which settings of the grid fail with one row alone, or without warm-up alone."""
    of = {row: by_setting(outcomes, row) for row in (REALFORMER, POSTLN, PRELN)}
    cold, warm = ({row: _part(own, warmed) for row, own in of.items()} for warmed in (0, 1))
    yield from _failing(
        "RealFormer stabilises training",
        *(PAPER, REALFORMER, of[REALFORMER], POSTLN, of[POSTLN]),
    )
    yield from _failing(
        "RealFormer is as easy to train as PreLN (it does not fail in more settings)",
        *(POST, REALFORMER, of[REALFORMER], PRELN, of[PRELN]),
    )
    yield from _failing(
        "PostLN needs warm-up (it fails in more settings without)",
        *(POST, "PostLN without warm-up", cold[POSTLN], "with", warm[POSTLN]),
        sign=1,
    )
    yield from _failing(
        "RealFormer needs warm-up less than PostLN",
        *(POST, "without warm-up: RealFormer", cold[REALFORMER], "PostLN", cold[POSTLN]),
    )
    every = (cold[REALFORMER], warm[REALFORMER], cold[POSTLN], warm[POSTLN])
    places = [
        point
        for point in cold[REALFORMER]
        if all(point in part and part[point].loss is not None for part in every)
    ]
    if places:
        warmups = {setting.warmup for setting in outcomes}
        yield Claim(
            "RealFormer needs warm-up less than PostLN",
            sum_of(
                (sign / len(places)) * LOSS.at(Setting(row, warmup, *point).where)
                for row, of_row in _BOTH
                for warmup, sign in ((min(warmups), of_row), (max(warmups), -of_row))
                for point in places
            ),
            POST,
            "grid: RealFormer − PostLN, loss without − with warm-up, mean over "
            f"{len(places)} settings, nats",
            sign=-1,
        )


Key = TypeVar("Key")


def _part(
    outcomes: Mapping[tuple[int, float, float], Outcome], warmed: int
) -> dict[tuple[float, float], Outcome]:
    """The outcomes with warm-up (1) or without (0), by learning rate and dropout."""
    return {point[1:]: end for point, end in outcomes.items() if (point[0] > 0) == bool(warmed)}


def _failing(
    sentence: str,
    source: str,
    name: str,
    mine: Mapping[Key, Outcome],
    other: str,
    theirs: Mapping[Key, Outcome],
    sign: int = -1,
) -> Iterator[Claim]:
    """How many settings fail in `mine` and in `theirs`: a two-sided exact sign test over them."""
    both = [(mine[point].failed, theirs[point].failed) for point in mine if point in theirs]
    if not both:
        return
    counts = [sum(pair[side] for pair in both) for side in (0, 1)]
    alone = [both.count((True, False)), both.count((False, True))]
    difference = Estimate(float(counts[0] - counts[1]), p=sign_test(*alone), count=len(both))
    measured = (
        f"grid, settings that failed: {name} {counts[0]} − {other} {counts[1]} of {len(both)} "
        f"(only one of them: {alone[0]}, {alone[1]})"
    )
    yield Claim(sentence, None, source, measured, sign, test=lambda view: difference, digits=0)

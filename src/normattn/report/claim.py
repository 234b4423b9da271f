"""Claims: a sentence of a source, the contrast that tests it, and a verdict.

Four verdicts are told apart. *found*: the difference has the claimed sign and its p, corrected
for all claims of the page (Holm), is at most 1 − level. *the opposite*: the same with the other
sign. *too little data*: fewer than three seeds on a side, no interval, or an interval so wide that
the smallest effect which it would have shown exceeds `matters`, whether or not it would have been
found as the page's only claim. *not found*: none of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from normattn.measure import Estimate, Statistic, holm
from normattn.measure.gather import Where
from normattn.report.table import shown
from normattn.report.view import Term, View

SEEDS = 3
"""Trainings on each side below which a claim about a score is not decided."""

Verdict = Literal["found", "the opposite", "not found", "too little data"]


@dataclass(frozen=True)
class Claim:
    """A sentence, who says it, and the difference that tests it.

    `sign` is +1 where the source says that the difference is above 0, −1 where below. `matters` is
    the least difference that would matter; None: any. `test` decides otherwise, where the units are
    chosen and not drawn (settings of a grid): it gives a difference and its exact p.
    """

    sentence: str
    source: str
    measured: str
    statistic: Statistic | None = None
    terms: tuple[Term, ...] = ()
    sign: int = 1
    matters: float | None = None
    test: Callable[[View], Estimate | None] | None = None
    digits: int | None = None

    def difference(self, view: View) -> Estimate | None:
        """The difference, or None where the frame does not hold it."""
        if self.test is not None:
            return self.test(view)
        assert self.statistic is not None
        return view.contrast(self.statistic, self.terms)


def difference(
    sentence: str,
    source: str,
    measured: str,
    statistic: Statistic,
    ours: Where,
    theirs: Where,
    *,
    sign: int = 1,
    matters: float | None = None,
) -> Claim:
    """The claim that a statistic is higher in `ours` than in `theirs` (`sign` −1: lower)."""
    terms = (Term(1.0, ours), Term(-1.0, theirs))
    return Claim(sentence, source, measured, statistic, terms, sign, matters)


@dataclass(frozen=True)
class Finding:
    """A claim decided; `p` is corrected for all claims of its page."""

    claim: Claim
    difference: Estimate
    p: float | None
    verdict: Verdict

    @property
    def size(self) -> str:
        """The difference in words."""
        claim = self.claim
        digits = claim.digits
        if digits is None:
            digits = claim.statistic.digits if claim.statistic else 2
        interval = claim.test is None or self.difference.low is not None
        return shown(self.difference, digits, signed=True, interval=interval)

    @property
    def remark(self) -> str:
        """What limits the verdict."""
        if self.verdict != "too little data":
            return ""
        few = len(self.difference.seeds)
        if self.p is None and 0 < few < SEEDS:
            return f"{few} seed{'s' * (few > 1)} on both sides; {SEEDS} are needed"
        least = self.difference.half_width
        if least is None:
            return "no interval"
        if abs(self.difference.value) > least:
            return "significant only before the correction"
        return f"only beyond ±{least:.3g} would it have shown"


def decide(claims: Sequence[Claim], view: View) -> list[Finding]:
    """Every claim that the frame can test, corrected as one family (Holm)."""
    tested = [(claim, claim.difference(view)) for claim in claims]
    known = [(claim, estimate) for claim, estimate in tested if estimate is not None]
    decidable = [
        index for index, (claim, estimate) in enumerate(known) if _decidable(claim, estimate)
    ]
    adjusted = holm([known[index][1].p or 0.0 for index in decidable])
    p_values = dict(zip(decidable, adjusted, strict=True))
    level = 1 - view.bootstrap.level
    return [
        Finding(
            claim,
            estimate,
            p_values.get(index),
            _verdict(claim, estimate, p_values.get(index), level),
        )
        for index, (claim, estimate) in enumerate(known)
    ]


def _decidable(claim: Claim, estimate: Estimate) -> bool:
    if claim.test is not None:
        return estimate.p is not None
    return estimate.p is not None and len(estimate.seeds) >= SEEDS


def _verdict(claim: Claim, estimate: Estimate, p: float | None, level: float) -> Verdict:
    if p is None:
        return "too little data"
    if p <= level and estimate.value != 0:
        return "found" if estimate.value * claim.sign > 0 else "the opposite"
    least = estimate.half_width
    if claim.matters is not None and least is not None and least > claim.matters:
        return "too little data"
    return "not found"

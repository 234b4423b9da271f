"""Claims: a source's sentence, the contrast that tests it, and a verdict.

A claim is *confirmed* where the difference has the claimed sign, and its p is at most α = 1 − the
confidence level, corrected for all claims of the report (Holm); *contradicted* with the opposite
sign; *inconclusive* with fewer than three seeds on a side, no interval, or a smallest detectable
effect above `matters`; else *not confirmed*.

A claim of no loss ("as good as", "gains nothing") has a margin m, as a test of non-inferiority. It
is *confirmed* where the difference is certainly not beyond m on the wrong side of 0, *contradicted*
where it is certainly beyond m, else *differs (size unclear)* where it is certainly on that side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from normattn.errors import InputError
from normattn.lab.report.tables import FEW_SEEDS, format_estimate
from normattn.lab.report.view import View
from normattn.lab.stats import Estimate, Metric, holm
from normattn.lab.stats.estimates import LEVEL

SEEDS = FEW_SEEDS
"""The fewest trainings on each side for a verdict on a score."""
ALPHA = 1 - LEVEL

Verdict = Literal[
    "confirmed", "contradicted", "differs (size unclear)", "not confirmed", "inconclusive"
]


@dataclass(frozen=True)
class Claim:
    """A sentence, the metric that tests it, the source, and a description of the metric.

    A metric without a method is that of the unmodified models.

    - `sign`: +1 where the sentence says that the metric is above 0, −1 for below.
    - `margin`: how far on the wrong side of 0 the sentence still holds.
    - `matters`: the smallest difference that would matter (None: any).
    - `test`: replaces the metric where units are chosen, not random (settings of a grid). It
      returns a difference and its exact p.
    """

    sentence: str
    metric: Metric | None = None
    source: str = "asked here"
    measured: str = ""
    sign: int = 1
    matters: float | None = None
    margin: float = 0.0
    test: Callable[[View], Estimate | None] | None = None
    digits: int | None = None

    def __post_init__(self) -> None:
        terms = self.metric.terms if self.metric is not None else ()
        if len(terms) > 1 and len({term.place for term in terms}) == 1:
            raise InputError(
                f"the claim {self.sentence!r} compares a configuration with itself; name another "
                "variant, length or method on one side"
            )

    def difference(self, view: View) -> Estimate | None:
        """The difference, or None where it was not measured."""
        if self.test is not None:
            return self.test(view)
        assert self.metric is not None
        return view.finite_estimate(self.metric, {"method": ""})


@dataclass(frozen=True)
class Finding:
    """A claim and its verdict; `p` is corrected for all claims of the report (None: untested).

    `uncorrected` are the verdicts that were possible, each with the p of its opposite.
    """

    claim: Claim
    difference: Estimate
    p: float | None
    verdict: Verdict
    uncorrected: tuple[tuple[Verdict, float], ...] = ()

    @property
    def size(self) -> str:
        """The difference as text."""
        claim, digits = self.claim, self.claim.digits
        if digits is None:
            digits = claim.metric.digits if claim.metric else 2
        interval = claim.test is None or self.difference.low is not None
        return format_estimate(self.difference, digits, signed=True, interval=interval)

    @property
    def probability(self) -> str:
        """The p value as text, with three digits and never rounded to 0."""
        if self.p is None:
            return "–"
        return f"{self.p:.3f}" if self.p >= 0.001 else "<0.001"

    @property
    def remark(self) -> str:
        """Why the verdict is inconclusive; "" for other verdicts."""
        seeds, smallest = len(self.difference.seeds), self.difference.half_width
        if self.verdict != "inconclusive":
            return ""
        if self.p is None and 0 < seeds < SEEDS:
            return f"{seeds} seed{'s' * (seeds > 1)} on both sides; {SEEDS} are needed"
        if smallest is None:
            return "no interval"
        if self.p is None:
            return "no spread: all documents and seeds agree"
        return f"smallest detectable effect ±{smallest:.3g}; ±{self.claim.matters:g} would matter"


def explain_verdicts(findings: Sequence[Finding]) -> str:
    """Explain the intervals, p values and verdicts of a report's claims."""
    count, tested = len(findings), sum(finding.p is not None for finding in findings)
    return (
        f"{count} claim{'s' * (count > 1)}, {tested} of them tested. p is corrected for their "
        "number (Holm). Brackets are uncorrected 95 % intervals. “Confirmed” and “contradicted” "
        f"need p ≤ {ALPHA:.2f}, and for scores {SEEDS} seeds on both sides. With "
        "fewer seeds, or an interval too wide to show what would matter, a claim is "
        "“inconclusive”. A claim of no loss has a margin: “differs (size unclear)” is certainly "
        "not 0, but not certainly within or beyond the margin."
    )


def verdicts_in_short(findings: Sequence[Finding]) -> tuple[str, ...]:
    """A sentence with the number of each verdict; empty where no claim was tested."""
    counts = Counter(finding.verdict for finding in findings if finding.p is not None)
    if not counts:
        return ()
    parts = [f"{counts[verdict]} {verdict}" for verdict in get_args(Verdict) if counts[verdict]]
    untested = len(findings) - counts.total()
    untested_note = f"; {untested} could not be tested with these seeds" if untested else ""
    total = counts.total()
    tested = "The tested claim is" if total == 1 else f"Of {total} tested claims:"
    return (f"{tested} {', '.join(parts).removeprefix('1 ' * (total == 1))}{untested_note}.",)


def decide(claims: Sequence[Claim], view: View) -> list[Finding]:
    """The findings of all measured claims, corrected as one family (Holm)."""
    differences = [(claim, claim.difference(view)) for claim in claims]
    measured = [(claim, estimate) for claim, estimate in differences if estimate is not None]
    hypotheses = [_hypotheses(claim, estimate) for claim, estimate in measured]
    groups = [number for number, sides in enumerate(hypotheses) for _ in sides]
    adjusted = iter(holm([p for sides in hypotheses for _, p in sides], groups))
    findings = []
    for (claim, estimate), sides in zip(measured, hypotheses, strict=True):
        p, verdict = _verdict(claim, estimate, [(side, next(adjusted)) for side, _ in sides])
        findings.append(Finding(claim, estimate, p, verdict, tuple(sides)))
    return findings


def _hypotheses(claim: Claim, estimate: Estimate) -> list[tuple[Verdict, float]]:
    """The possible verdicts, each with the p value of its opposite; empty with too few seeds."""
    if estimate.p is None or (claim.test is None and len(estimate.seeds) < SEEDS):
        return []
    signed = estimate.value * claim.sign
    if not claim.margin:
        return [("confirmed" if signed > 0 else "contradicted", estimate.p)]
    p_margin = estimate.p_from(-claim.margin * claim.sign)
    assert p_margin is not None, "a claim with a margin is tested by Student's t"
    return [
        ("confirmed" if signed > -claim.margin else "contradicted", p_margin),
        ("differs (size unclear)", estimate.p if signed < 0 else 1.0),
    ]


def _verdict(
    claim: Claim, estimate: Estimate, sides: Sequence[tuple[Verdict, float]]
) -> tuple[float | None, Verdict]:
    """(corrected p, verdict): the first verdict whose opposite is rejected."""
    if not sides:
        return None, "inconclusive"
    for verdict, p in sides:
        if p <= ALPHA and (estimate.value or claim.margin):
            return p, verdict
    smallest_p, width = min(p for _, p in sides), estimate.half_width
    too_wide = claim.matters is not None and width is not None and width > claim.matters
    return smallest_p, "inconclusive" if too_wide else "not confirmed"

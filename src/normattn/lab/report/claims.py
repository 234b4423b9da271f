"""Claims: a sentence of a source, the contrast that tests it, and a verdict.

A verdict is one of five. *confirmed*: the difference has the claimed sign and its p, corrected for
all claims of the report (Holm), is at most α = 1 − the confidence level. *contradicted*: the same
with the other sign.
*inconclusive*: fewer than three seeds on a side, no interval, or an interval so wide that the
smallest effect which it would have shown exceeds `matters`; the smallest detectable effect is
given. *not confirmed*: none of these. *differs (size unclear)*: see margins below.

A sentence that promises no loss ("as good as", "gains nothing") has a margin m, as a test of
non-inferiority has: *confirmed* where the difference is certainly less than m on the wrong side of
0, even if certainly on that side; *contradicted* where it is certainly more than m on that side;
else *differs (size unclear)* where it certainly is on that side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from normattn.errors import InputError
from normattn.lab.report.tables import FEW_SEEDS, shown
from normattn.lab.report.view import View
from normattn.lab.stats import Bootstrap, Estimate, Metric, holm

SEEDS = FEW_SEEDS
"""Trainings on each side below which a claim about a score is not decided."""
LEAST_P = 0.001
"""The smallest p that is written as a number."""

Verdict = Literal[
    "confirmed", "contradicted", "differs (size unclear)", "not confirmed", "inconclusive"
]


@dataclass(frozen=True)
class Claim:
    """A sentence, the metric that tests it, who says it, and how the metric is called.

    `sign` is +1 where the sentence says that the metric is above 0, −1 where below. `margin` is
    how far on the other side of 0 the sentence still holds. `matters` is the least difference that
    would matter; None: any. `test` decides in place of a metric where the units are
    chosen and not drawn (settings of a grid): it gives a difference and its exact p.
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
        """The difference, or None where the measurements do not hold it."""
        if self.test is not None:
            return self.test(view)
        assert self.metric is not None
        return view.known(self.metric)


@dataclass(frozen=True)
class Finding:
    """A claim decided; `p` is corrected for all claims of its report, None where not tested."""

    claim: Claim
    difference: Estimate
    p: float | None
    verdict: Verdict

    @property
    def size(self) -> str:
        """The difference as a sentence."""
        interval = self.claim.test is None or self.difference.low is not None
        return shown(self.difference, self._digits, signed=True, interval=interval)

    @property
    def _digits(self) -> int:
        own = self.claim.metric.digits if self.claim.metric else 2
        return own if self.claim.digits is None else self.claim.digits

    @property
    def probability(self) -> str:
        """The p value as text: three digits, never rounded to 0."""
        if self.p is None:
            return "–"
        return f"{self.p:.3f}" if self.p >= LEAST_P else f"<{LEAST_P}"

    @property
    def decided(self) -> str:
        """The verdict in Markdown, with what limits it."""
        return f"**{self.verdict}**" + (f" ({self.remark})" if self.remark else "")

    @property
    def remark(self) -> str:
        """What limits the verdict."""
        few, least = len(self.difference.seeds), self.difference.half_width
        if self.verdict != "inconclusive":
            return ""
        if self.p is None and 0 < few < SEEDS:
            return f"{few} seed{'s' * (few > 1)} on both sides; {SEEDS} are needed"
        if least is None:
            return "no interval"
        if self.p is None:
            return "no spread: all documents and seeds agree"
        return f"smallest detectable effect ±{least:.3g}; ±{self.claim.matters:g} would matter"


def explained(findings: Sequence[Finding]) -> str:
    """What a report says about its claims: how their intervals, p and verdicts are meant."""
    many, tested = len(findings), sum(finding.p is not None for finding in findings)
    return (
        f"{many} claim{'s' * (many > 1)}, {tested} of them tested. p is corrected for their number "
        "(Holm); brackets hold each difference's own 95 % interval. “Confirmed” and “contradicted” "
        f"need p ≤ {1 - Bootstrap.level:.2f}, of scores also {SEEDS} seeds on both sides; with "
        "fewer seeds, or an interval too wide to show what would matter, a claim is "
        "“inconclusive”. A claim of no loss has a margin: “differs (size unclear)” is certainly "
        "not 0, but neither within the margin nor beyond it."
    )


def verdicts_in_short(findings: Sequence[Finding]) -> tuple[str, ...]:
    """One sentence that counts the verdicts of the tested claims; none where nothing was tested."""
    counts = Counter(finding.verdict for finding in findings if finding.p is not None)
    if not counts:
        return ()
    parts = [f"{counts[verdict]} {verdict}" for verdict in get_args(Verdict) if counts[verdict]]
    untested = len(findings) - counts.total()
    rest = f"; {untested} could not be tested with these seeds" if untested else ""
    total = counts.total()
    tested = "The tested claim is" if total == 1 else f"Of {total} tested claims:"
    return (f"{tested} {', '.join(parts).removeprefix('1 ' * (total == 1))}{rest}.",)


def decide(claims: Sequence[Claim], view: View) -> list[Finding]:
    """Every claim that the measurements can test, corrected as one family (Holm)."""
    tested = [(claim, claim.difference(view)) for claim in claims]
    known = [(claim, estimate) for claim, estimate in tested if estimate is not None]
    hypotheses = [_hypotheses(claim, estimate) for claim, estimate in known]
    families = [number for number, sides in enumerate(hypotheses) for _ in sides]
    adjusted = iter(holm([p for sides in hypotheses for _, p in sides], families))
    alpha = 1 - view.bootstrap.level
    findings = []
    for (claim, estimate), sides in zip(known, hypotheses, strict=True):
        corrected = [(verdict, next(adjusted)) for verdict, _ in sides]
        findings.append(Finding(claim, estimate, *_verdict(claim, estimate, corrected, alpha)))
    return findings


def _hypotheses(claim: Claim, estimate: Estimate) -> list[tuple[Verdict, float]]:
    """The possible verdicts, and the p value of each one's opposite; none with too few seeds."""
    if estimate.p is None or (claim.test is None and len(estimate.seeds) < SEEDS):
        return []
    signed = estimate.value * claim.sign
    if not claim.margin:
        return [("confirmed" if signed > 0 else "contradicted", estimate.p)]
    apart = estimate.p_from(-claim.margin * claim.sign)
    assert apart is not None, "a claim with a margin is tested by Student's t"
    return [
        ("confirmed" if signed > -claim.margin else "contradicted", apart),
        ("differs (size unclear)", estimate.p if signed < 0 else 1.0),
    ]


def _verdict(
    claim: Claim, estimate: Estimate, sides: Sequence[tuple[Verdict, float]], alpha: float
) -> tuple[float | None, Verdict]:
    """(its corrected p, the first verdict whose denial is rejected)."""
    if not sides:
        return None, "inconclusive"
    for verdict, p in sides:
        if p <= alpha and (estimate.value or claim.margin):
            return p, verdict
    least, width = min(p for _, p in sides), estimate.half_width
    wide = claim.matters is not None and width is not None and width > claim.matters
    return least, "inconclusive" if wide else "not confirmed"

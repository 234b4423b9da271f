"""What the source says of key norms and cosines, each sentence with what tests it."""

from __future__ import annotations

from normattn.report.claim import Claim, difference
from normattn.report.view import Term, View
from normattn.studies.mechanism.measured import (
    CORRELATION,
    TAIL,
    cosine_quantile,
    lengths,
    where,
)

SOURCE = "kexue 9859"
WIDENED = " (KeyNorm widens what is trained, so they should not)"


def claims(view: View) -> list[Claim]:
    """The source's explanation, sentence by sentence."""
    near, far = lengths(view)
    highest, baseline = cosine_quantile(1 - TAIL), where(view, row="Baseline")
    decides = Claim(
        "without a norm a key's size decides how much attention it receives",
        SOURCE,
        "Baseline: rank correlation of ‖k‖ and attention received",
        CORRELATION,
        (Term(1.0, baseline),),
    )
    further = [
        difference(
            f"on longer text {row}'s cosines reach further{remark}",
            SOURCE,
            f"{row}: {1 - TAIL:.1%} quantile of cos(q, k), at {far:,} − at {near:,}",
            highest,
            *(where(view, row=row, length=length) for length in (far, near)),
        )
        for row, remark in (("Baseline", ""), ("KNA", WIDENED), ("KNA-NoPE", WIDENED))
    ]
    widens = difference(
        "KeyNorm widens the range of cosines that training reaches",
        SOURCE,
        f"{1 - TAIL:.1%} quantile at {near:,}: KNA − Baseline",
        *(highest, where(view, row="KNA"), baseline),
    )
    return [decides, *further, widens]

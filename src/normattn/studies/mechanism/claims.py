"""What the source says of key norms and cosines, each sentence with what tests it."""

from __future__ import annotations

from normattn.report.claim import Claim
from normattn.report.view import Term, View
from normattn.studies.mechanism.measured import (
    CORRELATION,
    TAIL,
    cosine_quantile,
    lengths,
    where,
)


def claims(view: View) -> list[Claim]:
    """The source's explanation, sentence by sentence."""
    near, far = lengths(view)
    found = []
    baseline = where(view, row="Baseline")
    found.append(
        Claim(
            "without a norm a key's size decides how much attention it receives",
            "kexue 9859",
            "Baseline: rank correlation of ‖k‖ and attention received",
            CORRELATION,
            (Term(1.0, baseline),),
        )
    )
    for row in ("Baseline", "KNA", "KNA-NoPE"):
        ends = [where(view, row=row, length=length) for length in (far, near)]
        found.append(
            Claim(
                f"on longer text {row}'s cosines reach further"
                + (
                    " (KeyNorm widens what is trained, so they should not)"
                    if row != "Baseline"
                    else ""
                ),
                "kexue 9859",
                f"{row}: {1 - TAIL:.1%} quantile of cos(q, k), at {far:,} − at {near:,}",
                cosine_quantile(1 - TAIL),
                (Term(1.0, ends[0]), Term(-1.0, ends[1])),
            )
        )
    found.append(
        Claim(
            "KeyNorm widens the range of cosines that training reaches",
            "kexue 9859",
            f"{1 - TAIL:.1%} quantile at {near:,}: KNA − Baseline",
            cosine_quantile(1 - TAIL),
            (Term(1.0, where(view, row="KNA")), Term(-1.0, baseline)),
        )
    )
    return found

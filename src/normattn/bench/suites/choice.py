"""The choice of a kernel: by this machine's times, and as on every machine, against SDPA.

4 heads of 64, batch × tokens = 4096, so that every length is as much work as the others.
"""

from __future__ import annotations

from normattn.bench.attending import Causal, Scored
from normattn.bench.case import Case, Goal, Suite
from normattn.bench.peers import Stock
from normattn.bench.settings import Settings
from normattn.bench.suites.tiles import grid, titled

AT_MOST = 1.1


def cases(settings: Settings) -> list[Case]:
    """Both choices at every point of the grid of `tiles`."""
    return [_case(precision, causal) for precision, causal in grid(settings)]


def _case(precision: str, causal: Causal) -> Case:
    entries = {
        "fastest": Scored(causal, "Baseline-NoPE", "fastest"),
        "portable": Scored(causal, "Baseline-NoPE", "portable"),
        "SDPA": Stock(causal),
    }
    goals = (Goal("fastest", "SDPA", at_most=AT_MOST), Goal("portable", "SDPA"))
    return Case(titled("choice", precision, causal), entries, goals, causal.dtype)


SUITE = Suite("choice", "kernels by this machine's times, and portable ones, against SDPA", cases)

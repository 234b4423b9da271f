"""The choice of a kernel: by this machine's times, and as on every machine, against SDPA.

4 heads of 64, batch × tokens = 4096, so that every length is as much work as the others.
"""

from __future__ import annotations

from normattn.bench.attending import Causal, Scored
from normattn.bench.case import Case, Goal, Suite
from normattn.bench.peers import Stock
from normattn.bench.settings import Settings
from normattn.bench.suites.tiles import LENGTHS, TOKENS

AT_MOST = 1.1


def cases(settings: Settings) -> list[Case]:
    """Every precision, length and pass; a GPU has no such choice."""
    if settings.on_gpu:
        return []
    lengths = settings.lengths if settings.quick else LENGTHS
    return [
        _case(precision, length, backward, settings)
        for precision in settings.dtypes
        for length in lengths
        for backward in (False, True)
    ]


def _case(precision: str, length: int, backward: bool, settings: Settings) -> Case:
    dtype = settings.dtypes[precision]
    batch = 1 if settings.quick else TOKENS // length
    causal = Causal(length, dtype, backward, settings.device, batch=batch)
    entries = {
        "fastest": Scored(causal, "Baseline-NoPE", "fastest"),
        "portable": Scored(causal, "Baseline-NoPE", "portable"),
        "SDPA": Stock(causal),
    }
    goals = (Goal("fastest", "SDPA", at_most=AT_MOST), Goal("portable", "SDPA"))
    name = f"choice {precision} {'f+b' if backward else 'f'}, {batch} × N {length}"
    return Case(name, entries, goals, dtype)


SUITE = Suite("choice", "kernels by this machine's times, and portable ones, against SDPA", cases)

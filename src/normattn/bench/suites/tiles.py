"""Tiles against the stock kernel at every length: where `auto` has to choose between them.

4 heads of 64, batch × tokens = 4096, so that every length is as much work as the others.
"""

from __future__ import annotations

from normattn.bench.attending import Causal, KernelAlone
from normattn.bench.case import Case, Goal, Suite
from normattn.bench.settings import Settings

TOKENS = 4096
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)


def grid(settings: Settings) -> list[tuple[str, Causal]]:
    """Every precision, length and pass, each with the precision's name; a GPU has no choice."""
    if settings.on_gpu:
        return []
    lengths = settings.lengths if settings.quick else LENGTHS
    return [
        (
            precision,
            Causal(length, dtype, backward, batch=1 if settings.quick else TOKENS // length),
        )
        for precision, dtype in settings.dtypes.items()
        for length in lengths
        for backward in (False, True)
    ]


def titled(suite: str, precision: str, causal: Causal) -> str:
    """The name of a suite's case at a point of the grid."""
    passes = "f+b" if causal.backward else "f"
    return f"{suite} {precision} {passes}, {causal.batch} × N {causal.length}"


def cases(settings: Settings) -> list[Case]:
    """Both kernels at every point of the grid."""
    return [_case(precision, causal) for precision, causal in grid(settings)]


def _case(precision: str, causal: Causal) -> Case:
    entries = {name: KernelAlone(causal, "plain", name) for name in ("chunked", "fused")}
    name = titled("tiles", precision, causal)
    return Case(name, entries, (Goal("chunked", "fused"),), causal.dtype)


SUITE = Suite("tiles", "tiles (`chunked`) against the stock kernel (`fused`) by length", cases)

"""Tiles against the stock kernel at every length: where `auto` has to choose between them.

4 heads of 64, batch × tokens = 4096, so that every length is as much work as the others.
"""

from __future__ import annotations

from normattn.bench.attending import Causal, KernelAlone
from normattn.bench.case import Case, Goal, Suite
from normattn.bench.settings import Settings

TOKENS = 4096
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)


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
    entries = {name: KernelAlone(causal, "plain", name) for name in ("chunked", "fused")}
    name = f"tiles {precision} {'f+b' if backward else 'f'}, {batch} × N {length}"
    return Case(name, entries, (Goal("chunked", "fused"),), dtype)


SUITE = Suite("tiles", "tiles (`chunked`) against the stock kernel (`fused`) by length", cases)

"""Peak memory of every kernel, forward and backward, beside the stock kernel's."""

from __future__ import annotations

from normattn.bench.attending import Causal, KernelAlone
from normattn.bench.case import Case, Entry, Goal, Suite
from normattn.bench.peers import Stock
from normattn.bench.settings import Settings

# What each kernel is asked. The reference, which holds the whole matrix, is not among them.
KINDS = {
    "fused": "plain",
    "chunked": "plain",
}
_AT_MOST = 2.0


def cases(settings: Settings) -> list[Case]:
    """One case per precision, at the shortest length that is not below 4096."""
    return [_case(precision, settings) for precision in settings.dtypes]


def _case(precision: str, settings: Settings) -> Case:
    length = next((n for n in settings.lengths if n >= 4096), settings.lengths[-1])
    dtype = settings.dtypes[precision]
    causal = Causal(length, dtype, True, settings.device)
    entries: dict[str, Entry] = {"SDPA": Stock(causal)}
    for backend, kind in KINDS.items():
        entries[backend] = KernelAlone(causal, kind, backend, settings.window)  # type: ignore[arg-type]
    goals = [Goal(name, "SDPA", of="memory", at_most=_AT_MOST) for name in KINDS]
    return Case(f"peak memory {precision} f+b, N {length}", entries, tuple(goals), dtype)


SUITE = Suite("memory", "peak memory of every kernel, f+b, beside SDPA's", cases)

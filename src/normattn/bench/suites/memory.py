"""Peak memory of every kernel, forward and backward, beside the stock kernel's.

The goal is for a step that has run before. The first one also fills the caches of libraries: in
half precision oneDNN compiles a product for every shape of a tile. It is reported beside.
"""

from __future__ import annotations

import dataclasses

from normattn.bench.attending import Causal, KernelAlone, Kind
from normattn.bench.case import Case, Entry, Goal, Suite
from normattn.bench.peers import Stock
from normattn.bench.settings import Settings
from normattn.kernels.dispatch import KERNELS, Kernel

# What each kernel is asked: the most that it is made for.
KINDS: dict[str, Kind] = {
    "fused": "plain",
    "chunked": "plain",
    "precise": "plain",
    "strips": "plain",
    "bias": "learned bias",
    "two-regime": "two-regime",
    "two-regime-flash": "two-regime",
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
    names = [kernel.name for kernel in KERNELS if _serves(kernel, causal, settings.window)]
    for name in names:
        entries[name] = KernelAlone(causal, KINDS[name], name, settings.window)
    goals = [Goal(name, "SDPA", of="memory", at_most=_AT_MOST) for name in names]
    goals += [Goal(name, "SDPA", of="first memory") for name in names]
    return Case(f"peak memory {precision} f+b, N {length}", entries, tuple(goals), dtype)


def _serves(kernel: Kernel, causal: Causal, window: int) -> bool:
    """Whether it is a kernel of this device.

    The reference holds the matrix, and what carries scores is measured by the stack (realformer).
    """
    if kernel.name not in KINDS:
        return False
    short = dataclasses.replace(causal, length=min(causal.length, 2 * window))
    problem = KernelAlone(short, KINDS[kernel.name], window=window).problem()
    return kernel.why_not(problem) is None


SUITE = Suite("memory", "peak memory of every kernel, f+b, beside SDPA's", cases)

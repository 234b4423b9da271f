"""Two regimes of position (ReRoPE) against the stock kernel and against two full matrices.

The kernel alone stands beside the bare stock kernel; `normattn.attention`, which also rotates
queries and keys at near and far positions, beside RoPE and the stock kernel.
"""

from __future__ import annotations

from normattn.bench.attending import Causal, KernelAlone, Scored
from normattn.bench.case import Case, Entry, Goal, Suite
from normattn.bench.peers import Flex, Stock, TwoMatrices
from normattn.bench.settings import Settings

# Ratio to the stock kernel, at most, in every precision and pass: which of both is quick in half
# precision is another thing on every processor.
_AT_MOST, _GPU_AT_MOST = 1.1, 1.2
_FASTER = 5.0
_LESS_MEMORY = 25.0


def cases(settings: Settings) -> list[Case]:
    """Every length, precision and pass; the two full matrices at the shortest length."""
    stock = [
        _against_stock(length, precision, backward, settings)
        for length in settings.lengths
        for precision in settings.dtypes
        for backward in (False, True)
    ]
    return stock + [_against_matrices(backward, settings) for backward in (False, True)]


def score(settings: Settings) -> str:
    """The specification that is measured."""
    return f"Baseline-ReRoPE(window={settings.window})@2048"


def _against_stock(length: int, precision: str, backward: bool, settings: Settings) -> Case:
    dtype = settings.dtypes[precision]
    causal = Causal(length, dtype, backward, settings.device)
    entries: dict[str, Entry] = {
        "kernel": KernelAlone(causal, "two-regime", window=settings.window),
        "SDPA": Stock(causal),
        "ReRoPE": Scored(causal, score(settings)),
        "RoPE + SDPA": Stock(causal, rope=True),
    }
    if settings.on_gpu:
        entries["flex_attention"] = Flex(causal)
        limit = _GPU_AT_MOST
    else:
        limit = _AT_MOST
    goals = [
        Goal("kernel", "SDPA", at_most=limit),
        Goal("ReRoPE", "RoPE + SDPA", at_most=limit),
        Goal("ReRoPE", "SDPA"),
    ]
    goals += [Goal("kernel", "flex_attention")] if settings.on_gpu else []
    passes = "f+b" if backward else "f"
    return Case(f"two-regime {precision} {passes}, N {length}", entries, tuple(goals), dtype)


def _against_matrices(backward: bool, settings: Settings) -> Case:
    length = 4096 if 4096 in settings.lengths else settings.lengths[0]
    precision, dtype = next(iter(settings.dtypes.items()))
    causal = Causal(length, dtype, backward, settings.device)
    entries: dict[str, Entry] = {
        "ReRoPE": Scored(causal, score(settings)),
        "two matrices": TwoMatrices(causal, settings.window),
    }
    goals = [Goal("ReRoPE", "two matrices", at_least=_FASTER)]
    if backward:
        goals.append(Goal("ReRoPE", "two matrices", of="memory", at_least=_LESS_MEMORY))
    passes = "f+b" if backward else "f"
    name = f"two-regime against two matrices, {precision} {passes}, N {length}"
    return Case(name, entries, tuple(goals), dtype)


SUITE = Suite("two-regime", "ReRoPE, window 512, against SDPA and two full matrices", cases)

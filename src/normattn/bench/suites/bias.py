"""Biases by distance, learned (KERPLE) and fixed (ALiBi), against the bare stock kernel.

The usual way, a mask that holds the bias of every pair, is reported at the shortest length.
"""

from __future__ import annotations

from normattn.bench.attending import Causal, Scored
from normattn.bench.case import Case, Entry, Goal, Suite
from normattn.bench.peers import Flex, MaskedALiBi, Stock
from normattn.bench.settings import Settings

_KERPLE, _ALIBI, _ALIBI_SHORT = 1.05, 1.05, 1.0
_SHORT = 1024


def cases(settings: Settings) -> list[Case]:
    """KERPLE forward and backward, ALiBi forward, at every length; ALiBi also at 1024 tokens."""
    lengths = settings.lengths
    short = () if settings.quick or settings.on_gpu else (_SHORT,)
    return [
        *(_case("Baseline-KERPLELog", length, True, _KERPLE, settings) for length in lengths),
        *(
            _case(
                "Baseline-ALiBi",
                length,
                False,
                _ALIBI_SHORT if length <= _SHORT else _ALIBI,
                settings,
            )
            for length in sorted({*lengths, *short})
        ),
    ]


def _case(spec: str, length: int, backward: bool, limit: float, settings: Settings) -> Case:
    precision, dtype = next(iter(settings.dtypes.items()))
    causal = Causal(length, dtype, backward, settings.device)
    name, fixed = spec.removeprefix("Baseline-"), spec.endswith("ALiBi")
    entries: dict[str, Entry] = {name: Scored(causal, spec), "SDPA": Stock(causal)}
    goals = [Goal(name, "SDPA", at_most=limit)]
    if length == settings.lengths[0]:
        entries["SDPA with a mask"] = MaskedALiBi(causal, learned=not fixed)
        goals.append(Goal(name, "SDPA with a mask"))
    if settings.on_gpu:
        entries["flex_attention"] = Flex(causal, alibi=fixed)
        goals.append(Goal(name, "flex_attention"))
    passes = "f+b" if backward else "f"
    return Case(f"{name} {precision} {passes}, N {length}", entries, tuple(goals), dtype)


SUITE = Suite("bias", "learned KERPLE and fixed ALiBi against SDPA without a bias", cases)

"""Scores that fold into queries and keys, with their fold, against RoPE and the stock kernel."""

from __future__ import annotations

from normattn.bench.attending import Causal, Scored
from normattn.bench.case import Case, Entry, Goal, Suite
from normattn.bench.peers import Flex, Stock
from normattn.bench.settings import Settings

SCORES = {
    "Baseline": "Baseline",
    "KNA": "KNA",
    "CosA": "CosA@2048",
    "QKRMSNorm": "QKRMSNorm",
    "Baseline-logn": "Baseline-logn@2048",
    "Baseline-YaRN": "Baseline-YaRN(factor=4)@2048",
}
_AT_MOST = 1.05


def cases(settings: Settings) -> list[Case]:
    """Forward and backward at every length, all scores in one run."""
    return [_case(length, settings) for length in settings.lengths]


def _case(length: int, settings: Settings) -> Case:
    precision, dtype = next(iter(settings.dtypes.items()))
    causal = Causal(length, dtype, True, settings.device)
    entries: dict[str, Entry] = {"RoPE + SDPA": Stock(causal, rope=True)}
    entries |= {name: Scored(causal, spec) for name, spec in SCORES.items()}
    goals = [Goal(name, "RoPE + SDPA", at_most=_AT_MOST) for name in SCORES]
    # What the normalisations cost beside our own rotation: reported, nothing is claimed.
    goals += [Goal(name, "Baseline") for name in SCORES if name != "Baseline"]
    if settings.on_gpu:
        entries["flex_attention"] = Flex(causal)
        goals.append(Goal("Baseline", "flex_attention"))
    return Case(f"folded {precision} f+b, N {length}", entries, tuple(goals), dtype)


SUITE = Suite("folded", "folded scores, fold and attention, against RoPE + SDPA", cases)

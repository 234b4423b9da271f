"""A decode step, one new token over a cache of N, against plain cached attention."""

from __future__ import annotations

from normattn.bench.attending import Causal
from normattn.bench.case import Case, Entry, Goal, Suite
from normattn.bench.decoding import DecodeStep
from normattn.bench.settings import Settings
from normattn.bench.suites import two_regime

SCORES = {
    "Baseline": "Baseline",
    "Baseline-logn": "Baseline-logn@2048",
    "KNA": "KNA",
    "Baseline-YaRN": "Baseline-YaRN(factor=4)@2048",
    "Baseline-NTK": "Baseline-NTK(factor=4)@2048",
    "ALiBi": "Baseline-ALiBi",
    "KERPLELog": "Baseline-KERPLELog",
}
_AT_MOST, _TWO_REGIMES = 1.05, 1.1
_PEER = "plain cached SDPA"


def cases(settings: Settings) -> list[Case]:
    """All scores in one run, for a cache of every length."""
    return [_case(length, settings) for length in settings.lengths]


def _case(length: int, settings: Settings) -> Case:
    precision, dtype = next(iter(settings.dtypes.items()))
    causal = Causal(length, dtype, False, settings.device)
    entries: dict[str, Entry] = {_PEER: DecodeStep(causal)}
    entries |= {name: DecodeStep(causal, spec) for name, spec in SCORES.items()}
    entries["ReRoPE"] = DecodeStep(causal, two_regime.score(settings))
    goals = [Goal(name, _PEER, at_most=_AT_MOST) for name in SCORES]
    goals.append(Goal("ReRoPE", _PEER, at_most=_TWO_REGIMES))
    # What a method costs beside our own plain step: reported, nothing is claimed.
    goals += [Goal(name, "Baseline") for name in entries if name not in (_PEER, "Baseline")]
    return Case(f"decode step {precision}, cache of {length}", entries, tuple(goals), dtype)


SUITE = Suite("decode", "one new token over a cache of N, against plain cached attention", cases)

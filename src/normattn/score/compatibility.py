"""Compatibility of score parts, found by trying every pair."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from normattn.errors import InputError
from normattn.score.parts import Part, parts
from normattn.score.spec import ScoreSpec

TRAIN_LENGTH, FACTOR = 512, 8.0
"""The training length and the factor of examples."""
# Tried in turn: parts alone, with a normalisation, and with rotary positions named beside a bias.
_COMPANY = (("Baseline",), ("QKRMSNorm",), ("Baseline", "RoPE"), ("QKRMSNorm", "RoPE"))


@dataclass(frozen=True)
class Combinations:
    """What a component excludes, each with the reason, and what it allows next to RoPE."""

    excludes: Mapping[str, str]
    beside_rope: tuple[str, ...]


def example(name: str) -> ScoreSpec:
    """The smallest score that has this part, for a training length of 512 and a factor of 8."""
    return next(spec for spec, _, _ in _attempts((parts()[name],)) if spec is not None)


@cache
def combinations() -> Mapping[str, Combinations]:
    """Combinations of every part; two parts of one slot never combine and are not listed."""
    known = parts()
    excludes: dict[str, dict[str, str]] = {name: {} for name in known}
    beside: dict[str, list[str]] = {name: [] for name in known}
    for one, other in itertools.combinations(known.values(), 2):
        if one.slot is other.slot:
            continue
        refused: list[str] = []
        company: tuple[str, ...] | None = None
        for spec, names, reason in _attempts((one, other)):
            if spec is not None:
                company = names
                break
            refused.append(reason)
        for name, mate in ((one.name, other.name), (other.name, one.name)):
            if company is None:
                excludes[name][mate] = _clearest(refused, (one, other))
            elif "RoPE" in company:
                beside[name].append(mate)
    return {name: Combinations(excludes[name], tuple(beside[name])) for name in known}


_Attempt = tuple[ScoreSpec | None, tuple[str, ...], str]


def _attempts(wanted: tuple[type[Part], ...]) -> Iterator[_Attempt]:
    """Scores of these parts in company that fills the other slots; None and why where refused."""
    taken = {part.slot for part in wanted}
    known = parts()
    for company in dict.fromkeys(
        tuple(name for name in names if known[name].slot not in taken) for names in _COMPANY
    ):
        text = "-".join((*company, *(part.name for part in wanted)))
        try:
            spec = ScoreSpec.parse(text, train_length=TRAIN_LENGTH).resolve(factor=FACTOR)
        except InputError as error:
            yield None, company, str(error)
        else:
            yield spec, company, ""


def _clearest(reasons: list[str], wanted: tuple[type[Part], ...]) -> str:
    """The sentence that is about the wanted parts and not about their company."""
    names = [part.name for part in wanted]
    return max(reasons, key=lambda reason: sum(name in reason for name in names))


def needs(name: str) -> str:
    """Which attention a part is for: causal, bidirectional, or either."""
    spec = example(name)
    if spec.needs_causal:
        return "causal"
    return "bidirectional" if spec.leaks_future else "either"

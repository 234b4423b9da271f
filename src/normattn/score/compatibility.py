"""Which score components can be combined, found by trying every pair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from normattn.errors import InputError
from normattn.score.parts import Part, parts
from normattn.score.spec import ScoreSpec

TRAIN_LENGTH, FACTOR = 512, 8.0
"""The training length and the extension factor of examples."""
# Components to complete a pair with, tried in turn: a variant, and RoPE, which biases drop.
_FILLERS = (("Baseline",), ("QKRMSNorm",), ("Baseline", "RoPE"), ("QKRMSNorm", "RoPE"))


@dataclass(frozen=True)
class Combinations:
    """The components that a component excludes, with reasons, and those that also need RoPE."""

    excludes: Mapping[str, str]
    beside_rope: tuple[str, ...]


def example(name: str) -> ScoreSpec:
    """The smallest score with this component, for a training length of 512 and a factor of 8."""
    return next(spec for spec, _, _ in _attempts((parts()[name],)) if spec is not None)


def combinations(name: str) -> Combinations:
    """The combinations of a component; two of one type never combine and are not listed."""
    known = parts()
    excludes: dict[str, str] = {}
    beside: list[str] = []
    names = list(known)
    for other in names:
        if known[name].slot is known[other].slot:
            continue
        fillers, reason = _combine(*sorted((name, other), key=names.index))
        if fillers is None:
            excludes[other] = reason
        elif "RoPE" in fillers:
            beside.append(other)
    return Combinations(excludes, tuple(beside))


@cache
def _combine(*pair: str) -> tuple[tuple[str, ...] | None, str]:
    """The first fillers with which a pair is a score, or None and the reason."""
    reasons: list[str] = []
    for spec, fillers, reason in _attempts(tuple(parts()[name] for name in pair)):
        if spec is not None:
            return fillers, ""
        reasons.append(reason)
    # Prefer a reason that names both components.
    return None, max(reasons, key=lambda reason: sum(name in reason for name in pair))


_Attempt = tuple[ScoreSpec | None, tuple[str, ...], str]


def _attempts(wanted: tuple[type[Part], ...]) -> Iterator[_Attempt]:
    """Try each set of fillers: yield the score or None, the fillers, and the reason for None."""
    taken = {part.slot for part in wanted}
    known = parts()
    for fillers in dict.fromkeys(
        tuple(name for name in names if known[name].slot not in taken) for names in _FILLERS
    ):
        text = "-".join((*fillers, *(part.name for part in wanted)))
        try:
            spec = ScoreSpec.parse(text, train_length=TRAIN_LENGTH).resolve(factor=FACTOR)
        except InputError as error:
            yield None, fillers, str(error)
        else:
            yield spec, fillers, ""


def needs(name: str) -> str:
    """The attention that a part needs: causal, bidirectional or either."""
    spec = example(name)
    if spec.needs_causal:
        return "causal"
    return "bidirectional" if spec.leaks_future else "either"

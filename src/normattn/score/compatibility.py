"""Which score components can be combined, found by trying every pair."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from normattn.errors import InputError
from normattn.score.parts import parts
from normattn.score.spec import ScoreSpec

TRAIN_LENGTH, FACTOR = 512, 8.0
"""The training length and the extension factor of examples."""
# Components to complete a pair with, tried in turn: a variant, and RoPE, which biases drop.
_FILLERS = (("Baseline",), ("QKRMSNorm",), ("Baseline", "RoPE"), ("QKRMSNorm", "RoPE"))


class Combinations(NamedTuple):
    """The components that a component excludes, with reasons, and those that also need RoPE."""

    excludes: Mapping[str, str]
    beside_rope: tuple[str, ...]


def example(name: str) -> ScoreSpec:
    """The smallest score with this component, for a training length of 512 and a factor of 8."""
    spec = _combine(name)[0]
    assert spec is not None
    return spec


def combinations(name: str) -> Combinations:
    """The combinations of a component; two of one type never combine and are not listed."""
    known = parts()
    excludes: dict[str, str] = {}
    beside: list[str] = []
    names = list(known)
    for other in names:
        if known[name].slot is known[other].slot:
            continue
        spec, fillers, reason = _combine(*sorted((name, other), key=names.index))
        if spec is None:
            excludes[other] = reason
        elif "RoPE" in fillers:
            beside.append(other)
    return Combinations(excludes, tuple(beside))


@cache
def _combine(*names: str) -> tuple[ScoreSpec | None, tuple[str, ...], str]:
    """The score of these components with the first fillers that allow it, or None and why not."""
    known, reasons = parts(), list[str]()
    taken = {known[name].slot for name in names}
    free = (tuple(x for x in fillers if known[x].slot not in taken) for fillers in _FILLERS)
    for fillers in dict.fromkeys(free):
        try:
            spec = ScoreSpec.parse("-".join((*fillers, *names)), train_length=TRAIN_LENGTH)
            return spec.resolve(factor=FACTOR), fillers, ""
        except InputError as error:
            reasons.append(str(error))
    # Prefer a reason that names all components.
    return None, (), max(reasons, key=lambda reason: sum(name in reason for name in names))


def needs(name: str) -> str:
    """The attention that a part needs: causal, bidirectional or either."""
    spec = example(name)
    if spec.needs_causal:
        return "causal"
    return "bidirectional" if spec.leaks_future else "either"

"""Variants that come in three sides: a normalisation on queries and keys, or on one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from normattn.errors import InputError
from normattn.score.normalisation import Normalisation
from normattn.score.own_scale import OwnScale
from normattn.score.registry import register

_WHO = {"QK": "queries and keys", "Q": "queries", "K": "keys"}


@dataclass(frozen=True)
class SidedNorm(OwnScale):
    """A normalisation on the sides that the name begins with; keeps 1/√d, or `scale`."""

    kind: ClassVar[str]
    sides: ClassVar[str]

    def normalisation(self) -> Normalisation:
        """The normalisation, with this part's parameters."""
        raise InputError(f"{self.name} names no normalisation")

    def query_norm(self) -> Normalisation | None:
        """The normalisation where the name holds Q."""
        return self.normalisation() if "Q" in self.sides else None

    def key_norm(self) -> Normalisation | None:
        """The normalisation where the name holds K."""
        return self.normalisation() if "K" in self.sides else None


def define_sides(
    base: type[SidedNorm], kind: str, title: str, meaning: str, source: str, note: str = ""
) -> dict[str, type[SidedNorm]]:
    """Register `QK…`, `Q…` and `K…` of one norm; `meaning` says what N is. By name.

    The caller puts them into its module, where pickle looks for them.
    """
    made: dict[str, type[SidedNorm]] = {}
    for sides, who in _WHO.items():
        left = "N(q)" if "Q" in sides else "q"
        right = "N(k)" if "K" in sides else "k"
        equation = f"s = ⟨{left}, {right}⟩ / √d, {meaning}"
        body = {
            "__doc__": f"{title} on {who}: {equation} ({source}).",
            "__module__": base.__module__,
            "name": f"{sides}{title}",
            "kind": kind,
            "sides": sides,
            "summary": f"{title} on {who}, scale 1/√d{note}",
            "equation": equation,
            "source": source,
        }
        part = type(f"{sides}{title}", (base,), body)
        made[part.__name__] = register(dataclass(frozen=True)(part))
    return made

"""Rows that a table cannot have, and why: each a sentence, or grouped by their reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Omission:
    """A score that cannot be trained (no `method`), or not be read with a method, and why."""

    variant: str
    method: str
    reason: str

    @property
    def sentence(self) -> str:
        """The row, and why it is left out."""
        return f"{_row(self.variant, self.method)} is left out: {self.reason}"


def grouped(omissions: Sequence[Omission]) -> list[str]:
    """One sentence for all rows that are left out for one reason, whatever their names."""
    methods: dict[tuple[str, str], list[Omission]] = {}
    for omission in omissions:
        methods.setdefault((omission.variant, _pattern(omission)), []).append(omission)
    groups: dict[tuple[str, tuple[str, ...]], list[Omission]] = {}
    for (_, pattern), group in methods.items():
        alike = tuple(omission.method for omission in group)
        groups.setdefault((pattern, alike), []).append(group[0])
    sentences = []
    for (_, alike), group in groups.items():
        if len(group) == 1 and len(alike) == 1:
            sentences.append(group[0].sentence)
            continue
        row = _row(", ".join(omission.variant for omission in group), ", ".join(alike))
        sentences.append(f"{row} are left out, as {group[0].reason}")
    return sentences


def _row(variant: str, method: str) -> str:
    return f"{variant} with {method}" if method else variant


def _pattern(omission: Omission) -> str:
    """The reason without the names of the row."""
    text = omission.reason
    for name, mask in ((omission.method, "METHOD"), (omission.variant, "VARIANT")):
        text = text.replace(name, mask) if name else text
    # Names print their parts in the order of slots: VARIANT-METHOD may be torn apart.
    words = [word for word in text.split() if "METHOD" not in word or word == "METHOD"]
    return " ".join(words)

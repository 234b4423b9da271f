"""Rows of the tables: a score, and what its models are trained with beside it, `Baseline+Muon`.

Each name after a + is that of settings, which are laid over the training's: another optimiser,
QK-Clip. A preset's `trained_with` changes what they are, and may add others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normattn.errors import InputError, unknown
from normattn.lab.sweep.settings import merged
from normattn.score import ScoreSpec

Layer = Mapping[str, Any]
"""Settings by name."""
MUON, CLIP = "Muon", "QK-Clip"
TRAINED_WITH: Mapping[str, Layer] = {
    # The steps of its matrices have the size of AdamW's (arXiv 2502.16982): the same learning rate.
    MUON: {"optimiser": {"name": "muon"}},
    # 100 at the size of Kimi K2; a bound that is reached in small trainings (arXiv 2507.20534).
    CLIP: {"qk_clip": 30.0},
}
_JOINT = re.compile(r"\+(?=[A-Za-z])")
"""A + before a name: that of `logn+` and of 1e+06 joins nothing."""


@dataclass(frozen=True)
class Trained:
    """A row: its printed name, and the names of what its models are trained with."""

    name: str
    settings: tuple[Layer, ...] = ()

    def over(self, training: Layer) -> dict[str, Any]:
        """The row's own training settings."""
        return merged(training, *self.settings)


def parts(row: str) -> tuple[str, tuple[str, ...]]:
    """A row's score and what its models are trained with, as they are called."""
    score, *others = _JOINT.split(row)
    return score, tuple(others)


def rows_of(names: Sequence[str], known: Mapping[str, Layer]) -> dict[str, Trained]:
    """The rows by their printed names, in this order.

    Raises `InputError` for what is not `known`, for a row that is named twice, and for a score with
    a method: it is applied after training.
    """
    rows: dict[str, Trained] = {}
    for name in names:
        row = _row(name, known)
        if row.name in rows:
            raise InputError(f"a score is named twice: {', '.join(names)}")
        rows[row.name] = row
    return rows


def _row(name: str, known: Mapping[str, Layer]) -> Trained:
    score, others = parts(name)
    spec = ScoreSpec.parse(score)
    if spec.method:
        raise InputError(f"{score} holds {spec.method}, which is applied after training")
    for other in others:
        if other not in known:
            raise unknown("training of a row", other, known, f" (in {name})")
    # In the order of `known`: one row has one name, and the same settings come last.
    ordered = [other for other in known if other in others]
    if len(ordered) != len(others):
        raise InputError(f"{name} names something twice")
    return Trained("+".join((spec.text, *ordered)), tuple(known[other] for other in ordered))

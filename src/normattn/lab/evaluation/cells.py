"""What every protocol shares: whose evaluation it is, batches, the identity of what it measures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from normattn.lab.data.retrieval import RetrievalSet
from normattn.lab.data.windows import EvaluationSet
from normattn.lab.stats import Identity
from normattn.lab.stats.frame import Factor

AnySet = EvaluationSet | RetrievalSet


@dataclass(frozen=True)
class CellInfo:
    """Whose evaluation it is: the trained row, its seed, the method, the whole score, the weights.

    `factors` are what a study varies beside these.
    """

    variant: str
    seed: int
    method: str
    spec: str
    weights: str
    precision: str = "fp32"
    split: str = "test"
    factors: Mapping[str, Factor] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """How messages call it."""
        return "-".join(filter(None, (self.variant, self.method)))


def batches(windows: int, rows: int) -> Iterator[slice]:
    """Slices of at most `rows` windows that cover them all."""
    for first in range(0, windows, rows):
        yield slice(first, first + rows)


def identity(cell: CellInfo, chosen: AnySet, **factors: Factor) -> Identity:
    """Whose measurement the evaluation of `chosen` is; the study that collects it adds its name."""
    return Identity(
        study="",
        row=cell.variant,
        score=cell.spec,
        method=cell.method,
        seed=cell.seed,
        protocol=chosen.protocol,
        length=chosen.length,
        train_length=chosen.train_length,
        split=cell.split,
        data=chosen.fingerprint,
        weights=cell.weights,
        settings=cell.precision,
        factors={**cell.factors, **factors},
    )

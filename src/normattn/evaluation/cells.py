"""What every protocol shares: whose evaluation it is, batches, the first fields of a record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from normattn.data.evaluation_sets import EvaluationSet
from normattn.data.retrieval import RetrievalSet

Progress = Callable[[int, int], None]
"""Called with the windows done and the windows of the cell."""

AnySet = EvaluationSet | RetrievalSet


@dataclass(frozen=True)
class CellInfo:
    """Whose evaluation it is: the run, its seed, the score's names, the digest of its weights."""

    run: str
    seed: int
    variant: str
    method: str
    name: str
    spec: str
    weights: str
    precision: str = "fp32"


def batches(windows: int, rows: int) -> Iterator[slice]:
    """Slices of at most `rows` windows that cover them all."""
    for first in range(0, windows, rows):
        yield slice(first, first + rows)


def cell_fields(cell: CellInfo, chosen: AnySet, key: str) -> dict[str, Any]:
    """The fields that every record has."""
    return {
        "key": key,
        "run": cell.run,
        "seed": cell.seed,
        "variant": cell.variant,
        "method": cell.method,
        "name": cell.name,
        "spec": cell.spec,
        "protocol": chosen.protocol,
        "length": chosen.length,
        "train_length": chosen.train_length,
        "precision": cell.precision,
        "weights": cell.weights,
        "data": chosen.fingerprint,
        "documents": tuple(chosen.documents),
    }

"""What is kept of a classified test set, as JSON: the true and the predicted labels of each text.

A document's row of counts is, for each label, whether it is rightly predicted (tp), predicted, and
true; F1 = 2 tp/(predicted + true) is then a function of summed counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from normattn.reports.record_file import read_file, write_file

Array = NDArray[np.float64]
Labels = tuple[tuple[int, ...], ...]


class ClassificationRecord(BaseModel):
    """One trained classifier on one set of documents.

    `true` and `predicted` are the numbers of each document's labels, `loss` its binary
    cross-entropy (nats, mean over labels). `threshold` is what a label's probability must reach; it
    was tuned on the development set, where it gave `development_micro_f1`. `micro_f1` and
    `macro_f1` are torchmetrics'. `weights` and `data` are fingerprints.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal[1] = 1
    variant: str
    seed: int
    parameters: int
    weights: str
    data: str
    split: str
    labels: tuple[str, ...] = Field(min_length=1)
    documents: tuple[str, ...] = Field(min_length=1)
    threshold: float
    development_micro_f1: float
    micro_f1: float
    macro_f1: float
    true: Labels
    predicted: Labels
    loss: tuple[float, ...]

    @model_validator(mode="after")
    def _fits_together(self) -> ClassificationRecord:
        if {len(self.true), len(self.predicted), len(self.loss)} != {len(self.documents)}:
            raise ValueError(f"the rows are not of {len(self.documents)} documents")
        highest = max(
            (n for rows in (self.true, self.predicted) for r in rows for n in r), default=0
        )
        if highest >= len(self.labels):
            raise ValueError(f"a document has label {highest} of {len(self.labels)}")
        return self

    def counts(self) -> Array:
        """(documents, 3 · labels): rightly predicted, predicted, true, a row for every document."""
        true, predicted = (self._marked(rows) for rows in (self.true, self.predicted))
        return np.concatenate([true * predicted, predicted, true], axis=1)

    def losses(self) -> Array:
        """(documents, 2): the loss, and 1."""
        return np.stack([np.asarray(self.loss), np.ones(len(self.loss))], axis=1)

    def _marked(self, rows: Labels) -> Array:
        found = np.zeros((len(rows), len(self.labels)))
        for row, labels in enumerate(rows):
            found[row, list(labels)] = 1
        return found


def micro_f1(sums: Array) -> Array:
    """F1 of all labels together, in %: sums (…, 3 · labels) of `counts` → (…)."""
    hits, predicted, true = (part.sum(-1) for part in np.split(sums, 3, axis=-1))
    return np.asarray(100 * _divided(2 * hits, predicted + true))


def macro_f1(sums: Array, whole: Array | None = None) -> Array:
    """The mean F1, in %, of the labels that are true or predicted anywhere.

    Of a resample, `whole` are the sums of all documents: they say which labels count, and a label
    that no drawn document has keeps its F1 there. Left out, rare labels, whose F1 is low, would
    make every resample look better than the whole.
    """
    everything = sums if whole is None else whole
    f1, there = _each_f1(sums)
    known, counted = _each_f1(everything)
    each = np.where(counted, np.where(there, f1, known), 0.0)
    return np.asarray(100 * _divided(each.sum(-1), counted.sum(-1)))


def _each_f1(sums: Array) -> tuple[Array, NDArray[np.bool_]]:
    """F1 (0 … 1) of every label, and whether it is true or predicted anywhere."""
    hits, predicted, true = np.split(sums, 3, axis=-1)
    return _divided(2 * hits, predicted + true), predicted + true > 0


def _divided(above: Any, below: Any) -> Array:
    """above/below, 0 where there is nothing to divide by."""
    return np.asarray(above / np.maximum(below, 1e-300) * (below > 0))


def write_classification(path: Path, record: ClassificationRecord) -> None:
    """Write one record, whole or not at all."""
    write_file(path, record)


def read_classification(path: Path) -> ClassificationRecord:
    """Read one record; `InputError` names the file when it cannot be used."""
    return read_file(path, ClassificationRecord, "of a classification")

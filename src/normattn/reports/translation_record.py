"""What is kept of a translated test set, as JSON: a row of counts for every sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from normattn.reports.record_file import read_file, write_file
from normattn.reports.summed import CHARACTERS, ORDERS, Statistic, bleu, chrf, ratio_of

Counts = tuple[tuple[int, ...], ...]

STATISTICS: tuple[Statistic, ...] = (
    Statistic("bleu", "BLEU", "bleu", bleu),
    Statistic("chrf", "chrF", "chrf", chrf),
    Statistic("loss", "loss", "scored", ratio_of(1.0), digits=3, higher=False),
    Statistic("accuracy", "accuracy", "hits", ratio_of(100.0)),
)
"""The columns that a record gives; loss (nats) and accuracy (%) are of target tokens."""


class TranslationRecord(BaseModel):
    """One trained model on one set of sentence pairs.

    `bleu` and `chrf` are the counts that `reports.summed` adds up, `loss` the summed nats of each
    reference, `correct` of its `tokens` predicted right. Both counts and `translations` are None
    where only the references were read. `weights`, `data` are fingerprints; `signatures` is what
    sacrebleu says of its scores; `unigram` is the mean loss on the same tokens of guessing each by
    how often it comes in the training pairs, which a model that learnt anything beats.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal[1] = 1
    variant: str
    spec: str
    seed: int
    weights: str
    data: str
    split: str
    beam: int | None = None
    length_penalty: float | None = None
    signatures: tuple[str, ...] = ()
    unigram: float
    translations: tuple[str, ...] | None = None
    bleu: Counts | None = None
    chrf: Counts | None = None
    loss: tuple[float, ...] = Field(min_length=1)
    correct: tuple[int, ...]
    tokens: tuple[int, ...]

    @model_validator(mode="after")
    def _fits_together(self) -> TranslationRecord:
        count = len(self.loss)
        for name, width in (("bleu", 2 + 2 * ORDERS), ("chrf", 3 * CHARACTERS)):
            rows = getattr(self, name)
            if rows is not None and (len(rows) != count or any(len(r) != width for r in rows)):
                raise ValueError(f"{name} is not of {count} sentences by {width} counts")
        if {len(self.correct), len(self.tokens)} != {count}:
            raise ValueError(f"correct and tokens are not of {count} sentences")
        return self

    def counts(self, field: str) -> NDArray[np.float64] | None:
        """The counts of a statistic's field, (sentences, counts); None where not measured."""
        if field in ("bleu", "chrf"):
            rows = getattr(self, field)
            return None if rows is None else np.asarray(rows, dtype=np.float64)
        above = self.loss if field == "scored" else self.correct
        return np.stack([np.asarray(above, float), np.asarray(self.tokens, float)], axis=-1)


def write_translation(path: Path, record: TranslationRecord) -> None:
    """Write one record, whole or not at all."""
    write_file(path, record)


def read_translation(path: Path) -> TranslationRecord:
    """Read one record; `InputError` names the file when it cannot be used."""
    return read_file(path, TranslationRecord, "of translations")

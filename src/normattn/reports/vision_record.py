"""What is kept of a Vision Transformer's test, as JSON: a row of counts for every image."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from normattn.reports.record_file import read_file, write_file
from normattn.reports.summed import Statistic, ratio_of

STATISTICS: tuple[Statistic, ...] = (
    Statistic("accuracy", "accuracy (%)", "correct", ratio_of(100.0), digits=2),
    Statistic("loss", "loss (nats)", "loss", ratio_of(1.0), digits=4, higher=False),
)
"""The columns that a record gives, per image."""


class VisionRecord(BaseModel):
    """One trained model on one split of images.

    `score` is the row, `rate` by how much the learning rate was multiplied; `weights` and `data`
    are fingerprints. `loss` (nats) and `correct` (0 or 1) have an entry for every image. `largest`
    is the largest logit of any step of the training that was looked into, `entropy_share` the
    entropy of attention at the last one as a share of ln n (mean over layers and heads); None where
    none was.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal[1] = 1
    score: str
    spec: str
    rate: float = Field(gt=0)
    learning_rate: float = Field(gt=0)
    seed: int
    weights: str
    data: str
    split: str
    steps: int = Field(ge=1)
    parameters: int = Field(ge=1)
    tokens_per_image: int = Field(ge=1)
    classes: int = Field(ge=2)
    loss: tuple[float, ...] = Field(min_length=1)
    correct: tuple[int, ...]
    largest: float | None = None
    entropy_share: float | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> VisionRecord:
        if len(self.correct) != len(self.loss):
            raise ValueError(f"correct is not of {len(self.loss)} images")
        if not set(self.correct) <= {0, 1}:
            raise ValueError("correct is 0 or 1 for each image")
        return self

    @property
    def tokens(self) -> tuple[int, ...]:
        """Predictions that were scored: one for each image."""
        return (1,) * len(self.loss)

    def counts(self, field: str) -> NDArray[np.float64]:
        """The counts of a statistic's field, (images, 2)."""
        above = np.asarray(self.loss if field == "loss" else self.correct, dtype=np.float64)
        return np.stack([above, np.ones_like(above)], axis=-1)


@dataclass(frozen=True)
class VisionDivergence:
    """A training that ended in NaN: which, at which step, and where it began."""

    score: str
    rate: float
    learning_rate: float
    seed: int
    step: int
    where: str

    @property
    def sentence(self) -> str:
        """What happened."""
        at = "" if self.rate == 1 else f" at ×{self.rate:g} of the learning rate"
        return (
            f"{self.score}, seed {self.seed}{at}: diverged at step {self.step}; the first value "
            f"that is not finite came from {self.where}."
        )


def write_vision(path: Path, record: VisionRecord) -> None:
    """Write one record, whole or not at all."""
    write_file(path, record)


def read_vision(path: Path) -> VisionRecord:
    """Read one record; `InputError` names the file when it cannot be used."""
    return read_file(path, VisionRecord, "of images")

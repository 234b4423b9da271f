"""What the mechanism study counts in one trained model, as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from normattn.reports.record_file import read_file, write_file

DENSITY = (np.linspace(-1.5, 1.5, 42), np.linspace(-6.0, 6.0, 42))
"""Edges of `density`: log2 of ‖k‖ over its mean, and log2 of the attention received."""

Sums = tuple[tuple[float, ...], ...]
Counts = tuple[tuple[tuple[int, ...], ...], ...]


class MechanismRecord(BaseModel):
    """Sums per document (the first axis) and per head (layers · heads of them, layer by layer).

    `windows`: texts of a document. `correlation` and `spread`: sums over its texts of the rank
    correlation of ‖k_j‖ with the attention that j receives, and of the standard deviation of
    ‖k_j‖ over its mean; `varied`: texts in which the norms differ at all, which alone have a
    correlation; `raw_correlation`: the same of the key before its normalisation. `near`, `far`:
    counts of cosines in equal bins over −1 … 1 at the training length and at `length`; `near_ends`,
    `far_ends`: the least and the largest. `density`: texts' keys by log2 of ‖k‖ over its mean and
    log2 of the attention received, over all heads.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal[1] = 1
    variant: str
    seed: int
    train_length: int = Field(ge=1)
    length: int = Field(ge=1)
    weights: str
    data: str
    layers: int = Field(ge=1)
    heads: int = Field(ge=1)
    documents: tuple[str, ...] = Field(min_length=1)
    windows: tuple[int, ...]
    correlation: Sums
    varied: Sums
    raw_correlation: Sums
    spread: Sums
    near: Counts
    far: Counts
    near_ends: tuple[tuple[float, float], ...]
    far_ends: tuple[tuple[float, float], ...]
    density: tuple[tuple[int, ...], ...]


def write_mechanism(path: Path, record: MechanismRecord) -> None:
    """Write one record, whole or not at all."""
    write_file(path, record)


def read_mechanism(path: Path) -> MechanismRecord:
    """Read one record; `InputError` names the file when it cannot be used."""
    return read_file(path, MechanismRecord, "of the mechanism study")

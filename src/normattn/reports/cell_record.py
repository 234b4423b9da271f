"""What every record of an evaluation says first: whose it is, of what, on which data."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

RECORD_FORMAT: Literal[1] = 1

Rows = tuple[tuple[int, ...], ...]
FloatRows = tuple[tuple[float, ...], ...]


class CellRecord(BaseModel):
    """One trained run, one post-hoc method, one protocol and one context length.

    `weights` and `data` are fingerprints, `key` names the evaluation; `documents` says where each
    window (or sample) of the set is from. What was counted stands in the records of each kind, as
    sums and never as rates, so that any statistic can be made of it later without the model.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal[1] = RECORD_FORMAT
    key: str
    run: str
    seed: int
    variant: str
    method: str
    name: str
    spec: str
    protocol: str
    length: int = Field(ge=1)
    train_length: int = Field(ge=1)
    precision: str = "fp32"
    weights: str
    data: str
    documents: tuple[str, ...] = Field(min_length=1)


def checked_array(
    rows: Rows | FloatRows, shape: tuple[int, int], name: str, what: str = "windows by {} bins"
) -> NDArray[np.float64]:
    """The rows as an array of that shape; `ValueError` names them when they have another one."""
    if len(rows) != shape[0] or any(len(row) != shape[1] for row in rows):
        raise ValueError(f"{name} is not of {shape[0]} {what.format(shape[1])}")
    return np.asarray(rows, dtype=np.float64)


def check_bounded(
    part: NDArray[np.float64], whole: NDArray[np.float64], part_name: str, whole_name: str
) -> None:
    """`ValueError` unless every count of the part lies between 0 and its whole."""
    if np.any(part < 0) or np.any(part > whole):
        raise ValueError(f"a count of {part_name} is not between 0 and its {whole_name}")

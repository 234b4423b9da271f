"""What the norm study keeps beside its classifications: times of steps, and curves of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from normattn.reports.record_file import read_file, write_file

Lines = tuple[dict[str, Any], ...]


class StepTimes(BaseModel):
    """Seconds of an optimiser step of each norm, a value for every round; rounds belong together.

    Steps of one round are of the same batch, one after the other in one process.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal[1] = 1
    seconds: dict[str, tuple[float, ...]]
    device: str
    threads: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    precision: str

    @field_validator("seconds")
    @classmethod
    def _as_many(cls, value: dict[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
        if len({len(rounds) for rounds in value.values()}) != 1 or not all(value.values()):
            raise ValueError("every norm has a time in every round")
        return value


@dataclass(frozen=True)
class Training:
    """One training as it went: lines by step, on the development set and of the loss.

    `seconds` is its time at the pace that it had, with everything that a step brings (looks at the
    development set, checkpoints), None where it was too short to know.
    """

    steps: int
    metrics: Lines
    development: Lines
    seconds: float | None


def whole_time(lines: Sequence[dict[str, Any]], steps: int) -> float | None:
    """Seconds of all steps at the mean pace; the clock of a resumed training starts at 0 again."""
    seconds = done = 0.0
    before: dict[str, Any] = {"step": 0, "seconds": 0.0}
    for line in lines:
        if line["seconds"] >= before["seconds"] and line["step"] >= before["step"]:
            seconds += line["seconds"] - before["seconds"]
            done += line["step"] - before["step"]
        before = line
    return seconds / done * steps if done else None


def write_step_times(path: Path, record: StepTimes) -> None:
    """Write the record, whole or not at all."""
    write_file(path, record)


def read_step_times(path: Path) -> StepTimes:
    """Read one record; `InputError` names the file when it cannot be used."""
    return read_file(path, StepTimes, "of times")

"""Learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from normattn.structured import Settings

ScheduleName = Literal["constant", "cosine"]


class ScheduleConfig(Settings):
    """Warm-up from 0 over `warmup_steps`, then `constant`, or `cosine` down to `floor` × peak."""

    name: ScheduleName = "cosine"
    warmup_steps: int = Field(default=100, ge=0)
    floor: float = Field(default=0.1, ge=0.0, le=1.0)

    @model_validator(mode="after")
    def _check_floor(self) -> ScheduleConfig:
        # What a run writes of its settings holds the default too, so that one is let pass.
        default = type(self).model_fields["floor"].default
        if self.name == "constant" and self.floor != default:
            raise ValueError(
                f"floor {self.floor:g} changes nothing where the learning rate stays constant; "
                f"leave it at {default:g}, or take cosine"
            )
        return self


def multiplier(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """The share of the peak learning rate at `step` (1-based) of `steps`.

    Warm-up: t/w for t ≤ w. Then 1, or floor + (1 − floor)·(1 + cos(π·(t − w)/(T − w)))/2, which is
    1 at t = w and `floor` at the last step.
    """
    warmup = schedule.warmup_steps
    if step <= warmup:
        return step / warmup
    if schedule.name == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return schedule.floor + (1.0 - schedule.floor) * (1.0 + math.cos(math.pi * progress)) / 2.0

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from normattn.lab.training.config import ScheduleConfig, multiplier


def test_warmup_rises_in_equal_parts_to_the_peak() -> None:
    schedule = ScheduleConfig(name="constant", warmup_steps=4)
    assert [multiplier(schedule, step, 6) for step in range(1, 7)] == [0.25, 0.5, 0.75, 1, 1, 1]


def test_cosine_passes_its_known_points() -> None:
    schedule = ScheduleConfig(name="cosine", warmup_steps=10, floor=0.2)
    assert multiplier(schedule, 10, 110) == 1.0
    assert multiplier(schedule, 60, 110) == pytest.approx(0.6, abs=1e-15)
    assert multiplier(schedule, 35, 110) == pytest.approx(0.2 + 0.4 * (1 + math.sqrt(0.5)))
    assert multiplier(schedule, 110, 110) == pytest.approx(0.2, abs=1e-15)


@given(
    st.sampled_from(["constant", "cosine"]),
    st.integers(0, 50),
    st.integers(1, 100),
    st.floats(0, 1),
)
def test_it_rises_then_never_rises_and_stays_in_range(
    name: str, warmup: int, after: int, floor: float
) -> None:
    fields = {"name": name, "warmup_steps": warmup}
    own = {} if name == "constant" else {"floor": floor}
    schedule = ScheduleConfig.model_validate({**fields, **own})
    steps = warmup + after
    values = [multiplier(schedule, step, steps) for step in range(1, steps + 1)]
    assert values[:warmup] == sorted(values[:warmup])
    assert values[warmup:] == sorted(values[warmup:], reverse=True)
    assert all(0 < value <= 1 for value in values[: steps - 1])
    assert values[-1] >= 0


def test_a_floor_of_what_stays_constant_is_refused() -> None:
    ScheduleConfig(name="constant", floor=0.1)
    with pytest.raises(ValidationError, match="floor 0 changes nothing where the learning rate"):
        ScheduleConfig(name="constant", floor=0.0)

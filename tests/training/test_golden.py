"""The loss curve of the golden run, digit for digit where the arithmetic is the recorded one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .golden import RECORD, environment, losses


def test_the_loss_curve_is_the_recorded_one(tmp_path: Path) -> None:
    record = json.loads(RECORD.read_text())
    curve = losses(tmp_path / "run")
    assert len(curve) == 100
    assert curve[-1] < curve[0] - 0.5
    if environment() == record["environment"]:
        assert curve == record["losses"]
    else:
        assert curve == pytest.approx(record["losses"], rel=1e-4)

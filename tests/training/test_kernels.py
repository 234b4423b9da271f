"""A training's kernels: the same on every machine unless it asks for those of this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from normattn import InputError
from normattn.kernels.bucket import Bucket
from normattn.kernels.calibration import Calibration, Quicker, Times, using
from normattn.lab.training import train_causal
from normattn.lab.training.loop_config import LoopConfig

from .settings import small


class _TilesFirst(Calibration):
    """A table in which tiles are the quicker of any two kernels; it counts who asks."""

    asked = 0

    def __init__(self) -> None:
        super().__init__({}, clock=self._unread)

    def known(self, bucket: Bucket, rivals: tuple[str, ...]) -> Quicker | None:
        self.asked += 1
        times: Times = {name: 1.0 + (name != "chunked") for name in rivals}
        self.seconds[f"{bucket}: {' or '.join(rivals)}"] = dict(times)
        return super().known(bucket, rivals)

    @staticmethod
    def _unread() -> float:
        raise AssertionError("measured")


def test_trainings_are_portable_unless_they_ask_for_the_fastest(tmp_path: Path) -> None:
    """A table that would choose otherwise is not looked at: the curve is the same to the bit."""
    curves = {}
    for name in ("portable", "own", "fastest"):
        table = _TilesFirst()
        config = small(steps=4, **({"kernels": name} if name == "fastest" else {}))
        with using("portable" if name == "portable" else "fastest", table):
            train_causal(config, tmp_path / name, show_progress=False)
        curves[name] = (tmp_path / name / "metrics.jsonl").read_bytes()
        assert bool(table.asked) == (name == "fastest")
    assert curves["own"] == curves["portable"]


def test_the_setting() -> None:
    assert LoopConfig().kernels == "portable"
    assert "kernels" not in LoopConfig().model_dump()
    assert LoopConfig(kernels="fastest").model_dump()["kernels"] == "fastest"
    with pytest.raises(InputError, match="kernels"):
        LoopConfig.parse({"kernels": "quickest"})

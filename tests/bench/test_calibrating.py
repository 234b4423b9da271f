"""`normattn bench --calibration`: the times by which kernels are chosen, without a measurement."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.conftest import Command
from cli.conftest import command as command
from normattn.bench.attending import Causal, Scored
from normattn.kernels.calibration import Calibration, using


def test_the_usual_cases_are_measured_and_all_times_are_shown(
    command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "kernels.json"
    table = Calibration({}, path, itertools.count(0.0).__next__, {})
    table.seconds["more: strips or fused"] = {"strips": 2.0, "fused": 0.25}
    with using("fastest", table):
        said = command("bench", "--calibration", "--quick", "--device", "cpu")
    assert said.code == 0, said.err
    *lines, last = said.out.splitlines()
    assert len(lines) == 1 + 4 + 1
    assert lines[-1].split("  ")[0] == "more"
    assert "fused, 250 ms" in lines[-1]
    assert lines[-1].endswith("0.12")
    assert "float32 forward and backward, 1 × 4 heads of 64, 64 × 64 causal" in said.out
    assert str(path) in last
    assert path.exists()


def test_a_gpu_has_no_such_times(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    said = command("bench", "--calibration", "--device", "cuda")
    assert said.code == 2
    assert "--calibration is for a CPU" in said.err


def test_an_entry_takes_the_kernels_that_it_names() -> None:
    call = Causal(64, torch.bfloat16, backward=False)
    with using("fastest", Calibration({}, clock=_favouring_the_stock_kernel())):
        kernels = [Scored(call, "Baseline-NoPE", way).kernel() for way in ("fastest", "portable")]
    assert kernels == ["fused", "chunked"]


def _favouring_the_stock_kernel() -> Any:
    """Readings so that every second measurement, that of tiles, takes longer."""
    steps = itertools.cycle((1.0, 1.0, 1.0, 2.0))
    return itertools.accumulate(steps).__next__

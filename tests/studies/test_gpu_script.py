"""The script for the first minutes on a GPU, run whole on a CPU: stopped by the clock, and done."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from normattn.lab.studies.preset import load
from normattn.lab.sweep.config import merged
from normattn.lab.training.tasks.text import TrainingConfig

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu"


def gpu(out: Path, preset: Path, minutes: float) -> str:
    options = ["--device", "cpu", "--quick", "--benchmarks", "plain", "--preset", str(preset)]
    command = [sys.executable, str(SCRIPT), "--minutes", str(minutes), "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.thorough
def test_stopped_by_the_clock_and_then_all_done(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "gpu"
    said = gpu(out, tiny, minutes=0.1)
    assert "the time is over before kernels; run the same command to resume" in said
    assert not (out / "kernels.json").exists()
    gpu(out, tiny, minutes=30)
    kernels = json.loads((out / "kernels.json").read_text())["kernels"]
    assert len(kernels) > 20
    assert all(check["right"] for check in kernels)
    assert json.loads((out / "overhead.json").read_text())["microseconds"]
    assert (out / "benchmarks" / "plain" / "finished").exists()
    plan = json.loads((out / "plan.json").read_text())
    assert plan["settings"]["steps"] == 400  # the preset's: there is more than enough time
    facts = json.loads((out / "keynorm" / "table.json").read_text())["tables"]["table"]
    assert {fact["row"] for fact in facts} >= {"Baseline", "KNA"}


@pytest.mark.parametrize(
    ("most", "steps", "warmup"), [(1e9, 2600, 260), (1300.7, 1300, 130), (70.0, 70, 7), (0, 1, 0)]
)
def test_a_shorter_training_warms_up_for_its_share(most: float, steps: int, warmup: int) -> None:
    script, whole = runpy.run_path(str(SCRIPT)), load("gpu-12m").training
    fitting = script["steps_that_fit"](whole["steps"], whole["schedule"]["warmup_steps"], most)
    assert fitting == {"steps": steps, "schedule.warmup_steps": warmup}
    TrainingConfig.parse(merged(whole, fitting), "the shortened preset")

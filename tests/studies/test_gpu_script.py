"""The script for the first minutes on a GPU, run whole on a CPU: stopped, resumed, done."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
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


def test_stopped_by_the_clock_resumed_and_done(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "gpu"
    said = gpu(out, tiny, minutes=0.1)
    assert "the time is over while benchmarks plain ran; run the same command to resume" in said
    assert all(
        check["right"] for check in json.loads((out / "kernels.json").read_text())["kernels"]
    )
    assert not (out / "plan.json").exists()

    said = gpu(out, tiny, minutes=30)
    assert "right: " not in said
    plan = json.loads((out / "plan.json").read_text())
    assert plan["steps"] == 400  # the preset's: there is more than enough time
    facts = json.loads((out / "keynorm" / "table.json").read_text())["tables"]["table"]
    assert {fact["row"] for fact in facts} >= {"Baseline", "KNA", "CosA", "KNA-logn"}


@pytest.mark.parametrize(
    ("most", "steps", "warmup"),
    [(1e9, 20_000, 1000), (5000.7, 5000, 250), (700.0, 700, 35), (0, 1, 0)],
)
def test_a_shortened_training_warms_up_for_the_same_share(
    most: float, steps: int, warmup: int
) -> None:
    loader = SourceFileLoader("gpu_script", str(SCRIPT))
    script = module_from_spec(spec_from_loader("gpu_script", loader))  # type: ignore[arg-type]
    loader.exec_module(script)
    whole = load("gpu-100m").training
    fitting = script.steps_that_fit(whole["steps"], whole["schedule"]["warmup_steps"], most)
    assert fitting == {"steps": steps, "warmup_steps": warmup}
    changed = {"steps": steps, "schedule.warmup_steps": warmup}
    TrainingConfig.parse(merged(whole, changed), "the shortened preset")

"""The script for a borrowed GPU, run whole on a CPU with a tiny model: stopped, resumed, done."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu"


def gpu(out: Path, preset: Path, minutes: float) -> str:
    options = ["--device", "cpu", "--quick", "--suites", "folded", "--preset", str(preset)]
    command = [sys.executable, str(SCRIPT), "--minutes", str(minutes), "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_stopped_by_the_clock_resumed_and_done(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "gpu"
    said = gpu(out, tiny, minutes=0.1)
    assert "the time is over while normattn bench ran; run the same command to resume" in said
    assert all(each["right"] for each in json.loads((out / "kernels.json").read_text())["kernels"])
    assert not (out / "plan.json").exists()

    said = gpu(out, tiny, minutes=30)
    assert "right: " not in said
    steps = json.loads((out / "plan.json").read_text())["steps"]
    assert steps == 400  # the preset's: there is more than enough time
    facts = json.loads((out / "keynorm" / "table.json").read_text())["tables"]["table"]
    assert {fact["row"] for fact in facts} >= {"Baseline", "KNA", "CosA", "KNA-logn"}

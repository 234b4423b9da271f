"""The subset of `scripts/faults` that stands in the checks: fixed seed, every part, no failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from faults.campaign import part_names, read_record

SCRIPT = Path(__file__).parents[2] / "scripts" / "faults"
SEED = 20261122


@pytest.mark.parametrize("part", part_names(full=False))
def test_every_promise_holds(part: str, tmp_path: Path) -> None:
    # In a process of its own: the parts fork, and threads of other tests would be missing there.
    command = [sys.executable, str(SCRIPT), part, "--small", "--seed", str(SEED)]
    ran = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=600
    )
    record = read_record(tmp_path)
    assert part in record, ran.stderr[-2000:]
    for count in record[part].counts:
        assert count.trials > 0, count.promise
        assert not count.failures, f"{count.promise}: {count.failures[:5]}"
    assert ran.returncode == 0

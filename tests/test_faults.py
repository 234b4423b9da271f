"""The fast part of `scripts/faults`, with a fixed seed: killed, damaged, and out of room."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import apart

SCRIPT = Path(__file__).parents[1] / "scripts" / "faults"
SEED = 20261122
# Of damage it draws a stopped run and a corpus in one file: a study would take four times as long.
SEEDS = {"damage": 14}
# In a process of its own: the parts fork, and threads of other tests would be missing there.
PROGRAM = """
import runpy, sys
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("part", ["calls", "damage", "disk", "kills", "names", "signals"])
def test_every_promise_holds(part: str, tmp_path: Path) -> None:
    seed = SEEDS.get(part, SEED)
    ran = apart.run(PROGRAM, SCRIPT, part, "--small", "--seed", seed, "--out", tmp_path)
    record = tmp_path / f"{part}.json"
    assert record.exists(), ran.err[-2000:]
    for promise in json.loads(record.read_text())["promises"]:
        assert promise["trials"] > 0, promise["promise"]
        assert promise["failures"] == 0, f"{promise['promise']}: {promise['found'][:5]}"
    assert ran.code == 0

"""The fast part of `scripts/faults`, with a fixed seed: killed, damaged, and out of room."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import apart

SCRIPT = Path(__file__).parents[1] / "scripts" / "faults"
SEED = 20261122
# Of damage it draws a stopped run and a corpus in one file: a study would take four times as long.
DAMAGE_SEED = 14
# In a process of its own: the parts fork, and threads of other tests would be missing there.
PROGRAM = """
import runpy, sys
import pytest
from undrawn import undraw
del sys.argv[0]
undraw(pytest.MonkeyPatch())
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("parts", "seed"),
    [(("calls",), SEED), (("names",), SEED), (("damage", "disk", "kills", "signals"), DAMAGE_SEED)],
)
def test_every_promise_holds(parts: tuple[str, ...], seed: int, tmp_path: Path) -> None:
    """Those that run commands make what commands read once."""
    ran = apart.run(PROGRAM, SCRIPT, *parts, "--small", "--seed", seed, "--out", tmp_path)
    for part in parts:
        record = tmp_path / f"{part}.json"
        assert record.exists(), ran.err[-2000:]
        for promise in json.loads(record.read_text())["promises"]:
            assert promise["trials"] > 0, promise["promise"]
            assert promise["failures"] == 0, f"{promise['promise']}: {promise['found'][:5]}"
    assert ran.code == 0

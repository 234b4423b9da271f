"""The subset of `scripts/faults` that stands in the checks: fixed seed, every part, no failure."""

from __future__ import annotations

from pathlib import Path

import pytest

import apart
from faults.campaign import part_names, read_record

SCRIPT = Path(__file__).parents[2] / "scripts" / "faults"
SEED = 20261122
# In a process of its own: the parts fork, and threads of other tests would be missing there.
PROGRAM = """
import runpy, sys
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("part", part_names(full=False))
def test_every_promise_holds(part: str, tmp_path: Path) -> None:
    ran = apart.run(PROGRAM, SCRIPT, part, "--small", "--seed", SEED, "--out", tmp_path)
    record = read_record(tmp_path)
    assert part in record, ran.err[-2000:]
    for count in record[part].counts:
        assert count.trials > 0, count.promise
        assert not count.failures, f"{count.promise}: {count.failures[:5]}"
    assert ran.code == 0

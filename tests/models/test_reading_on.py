"""Every score reads on as it reads whole: `reading_on.py`, once for each kind of attention."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("block", ["mha", "gqa", "gau"])
def test_every_score_reads_on(block: str) -> None:
    program = Path(__file__).with_name("reading_on.py")
    done = subprocess.run(
        [sys.executable, str(program), block], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert int(done.stdout.split()[0]) > 50

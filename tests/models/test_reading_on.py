"""Every score reads on as it reads whole: `reading_on.py`, once for each kind of attention."""

from __future__ import annotations

from pathlib import Path

import pytest

import apart


@pytest.mark.parametrize("block", ["gqa", "gau"])
def test_every_score_reads_on(block: str) -> None:
    program = Path(__file__).with_name("reading_on.py")
    done = apart.run(program.read_text(), block)
    assert done.code == 0, done.out[-4000:] + done.err[-2000:]
    assert int(done.out.split()[0]) > 50

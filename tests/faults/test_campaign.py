"""The subset of `scripts/faults` that stands in the checks: fixed seed, every part, no failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.campaign import part_names, run_part

SEED = 20261122


@pytest.mark.parametrize("part", part_names(full=False))
def test_every_promise_holds(part: str, tmp_path: Path) -> None:
    result = run_part(part, tmp_path / part, SEED, full=False)
    assert result.counts
    for count in result.counts:
        assert count.trials > 0, count.promise
        assert not count.failures, f"{count.promise}: {count.failures[:5]}"

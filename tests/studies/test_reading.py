"""The reading study: its smoke preset runs whole, and what it does not read is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from normattn.errors import InputError
from normattn.lab.studies import keynorm
from normattn.lab.studies.reading import STUDY, resolve
from normattn.lab.sweep.run import Request
from studies.inprocess import files, run


def test_the_smoke_preset_asks_every_task(tmp_path: Path) -> None:
    few = {"training.steps": 5, "evaluation.max_windows": 5}
    sweep = resolve(
        Request("smoke", ("KNA",), ("as is", "ReRoPE"), out=tmp_path / "out", changes=few)
    )
    run(STUDY, sweep)
    page = json.loads(files(tmp_path / "out")["table.json"])
    rows = page["tables"]["retrieval"]
    assert [row["row"] for row in rows] == ["KNA", "KNA-ReRoPE"]
    asked = {name for name in rows[0] if name.endswith("_exact_1024")}
    assert len(asked) == 5
    assert not any(name.endswith("_exact_16") for name in rows[0])


def test_bad_input() -> None:
    with pytest.raises(InputError, match=r"reads reading\.multiples instead"):
        resolve(Request("smoke", changes={"evaluation.multiples": [1, 2]}))
    with pytest.raises(InputError, match="multiples must rise"):
        resolve(Request("smoke", changes={"reading.multiples": [4, 2]}))
    with pytest.raises(InputError, match="reads no reading settings"):
        keynorm.resolve(Request("smoke", changes={"reading.multiples": [4, 16]}))

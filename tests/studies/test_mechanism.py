"""The mechanism study: its rows, and that stopping it anywhere changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from normattn.errors import InputError
from normattn.studies.mechanism import STUDY, resolve
from normattn.sweep.study import Request
from studies.inprocess import files, run, run_killed

FEW: dict[str, Any] = {
    "training.steps": 5,
    "training.checkpoint_seconds": 0,
    "mechanism.max_windows": 4,
    "mechanism.max_tokens": 64,
    "mechanism.multiple": 4,
}


def test_the_rows() -> None:
    assert [cell.variant for cell in resolve(Request("laptop")).cells] == [
        *("Baseline", "KNA", "KNA-NoPE"),
        *("QKLayerNorm", "QKLayerNorm(gain=false)", "QKRMSNorm", "QKRMSNorm(gain=false)"),
    ]


def test_stopped_anywhere_it_is_the_same(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sweep(name: str) -> Any:
        variants = ("Baseline", "KNA")
        return resolve(Request(str(tiny), variants, out=tmp_path / name, changes=FEW))

    run(STUDY, sweep("whole"))
    assert run_killed(STUDY, sweep("broken"), 4, monkeypatch) > 1
    assert files(tmp_path / "broken") == files(tmp_path / "whole")
    page = json.loads(files(tmp_path / "whole")["table.json"])
    rows = page["tables"]["table"]
    assert [row["row"] for row in rows] == ["Baseline", "KNA"]
    assert rows[1]["correlation"] == "one norm"
    for row in rows:
        assert row["cosine_near_0.5"]["low"] <= row["cosine_near_0.5"]["value"]
        assert -1 <= row["cosine_far_0.001"]["value"] <= row["cosine_far_0.999"]["value"] <= 1
        assert 0 <= row["outside"]["value"] <= 100
    assert b"cosine_ranges" in files(tmp_path / "whole")["figures.txt"]


def test_bad_input(tiny: Path) -> None:
    with pytest.raises(InputError, match="chooses its own methods"):
        resolve(Request(str(tiny), methods=("YaRN",)))
    with pytest.raises(InputError, match=r"reads mechanism\.multiple instead"):
        resolve(Request(str(tiny), changes={"evaluation.multiples": [1, 2]}))
    with pytest.raises(InputError, match="multiple"):
        resolve(Request(str(tiny), changes={"mechanism.multiple": 1}))

"""The mechanism study: its rows, and that stopping it anywhere changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from normattn.errors import InputError
from normattn.studies.mechanism import resolve
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

    run(sweep("whole"))
    assert run_killed(sweep("broken"), 4, monkeypatch) > 1
    assert files(tmp_path / "broken") == files(tmp_path / "whole")
    assert {"cosine_ranges.png", "key_norms_and_attention.svg"} <= files(tmp_path / "whole").keys()
    rows = json.loads((tmp_path / "whole" / "table.json").read_text())
    assert [row["variant"] for row in rows] == ["Baseline", "KNA"]
    assert rows[1]["correlation"] is None
    for row in rows:
        assert (row["train_length"], row["length"]) == (8, 32)
        for each in (*row["cosine_near"], row["outside_percent"]):
            assert each["low"] <= each["high"]


def test_bad_input(tiny: Path) -> None:
    with pytest.raises(InputError, match="chooses its own methods"):
        resolve(Request(str(tiny), methods=("YaRN",)))
    with pytest.raises(InputError, match="multiple"):
        resolve(Request(str(tiny), changes={"mechanism.multiple": 1}))

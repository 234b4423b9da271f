"""The mechanism study: its rows, and that stopping it anywhere changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from normattn.errors import InputError
from normattn.lab.studies.mechanism import STUDY, resolve
from normattn.lab.sweep.run import Request
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
    figures = files(tmp_path / "whole")["figures.txt"]
    assert b"cosine_ranges" in figures
    assert b"last_accuracy" in figures


def test_norms_by_position_and_what_unseen_positions_cost(tiny: Path, tmp_path: Path) -> None:
    variants = ("Baseline", "KNA", "KNA-NoPE")
    run(STUDY, resolve(Request(str(tiny), variants, out=tmp_path, changes=FEW)))
    page = json.loads(files(tmp_path)["table.json"])
    whole, norms, distances, clamped = (
        {row["row"]: row for row in page["tables"][name]}
        for name in ("table", "positions", "distances", "clamped")
    )
    baseline, kna, nope = (norms[name] for name in variants)
    # The rotation keeps a norm, so the raw key says the same as the key that is scored.
    assert baseline["position"]["value"] == pytest.approx(
        baseline["raw_position"]["value"], abs=1e-3
    )
    assert [kna["position"], kna["position_size"]] == ["one norm", None]
    assert kna["first_key"]["value"] == pytest.approx(1, abs=1e-4)
    assert -1 <= nope["raw_position"]["value"] <= 1
    above, below, heads = map(int, baseline["position_heads"].split(" / "))
    assert above + below <= heads == 2  # one layer
    for row in distances.values():
        ends = sorted((row["near_outside"]["value"], row["far_outside"]["value"]))
        assert ends[0] <= whole[row["row"]]["outside"]["value"] <= ends[1]
        difference = row["far_outside"]["value"] - row["near_outside"]["value"]
        assert row["further"]["value"] == pytest.approx(difference, abs=1e-6)
        parts = (row[name]["value"] for name in ("near_attention", "far_attention", "far_inside"))
        assert 0 < sum(parts) < 100
    assert clamped["KNA-NoPE"]["accuracy_clamped"] is None
    for name in ("Baseline", "KNA"):
        row = clamped[name]
        gained = row["loss_clamped"]["value"] - row["loss_as_is"]["value"]
        assert row["loss_clamped_less_as_is"]["value"] == pytest.approx(gained, abs=1e-6)
    claims = [found["claim"] for found in page["claims"]]
    assert "a key's norm carries its position, whichever way" in claims
    assert "unseen positions cost KNA accuracy on longer text" in claims


def test_bad_input(tiny: Path) -> None:
    with pytest.raises(InputError, match="chooses its own methods"):
        resolve(Request(str(tiny), methods=("YaRN",)))
    with pytest.raises(InputError, match=r"reads mechanism\.multiple instead"):
        resolve(Request(str(tiny), changes={"evaluation.multiples": [1, 2]}))
    with pytest.raises(InputError, match="multiple"):
        resolve(Request(str(tiny), changes={"mechanism.multiple": 1}))

"""Trained models of one study taken over by another: the same bytes, and only its own models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from normattn.errors import InputError
from normattn.lab.studies import factors, keynorm
from normattn.lab.studies.mechanism import STUDY, resolve
from normattn.lab.sweep import taking
from normattn.lab.sweep.plan import make_plan
from normattn.lab.sweep.study import Request, Sweep
from studies.inprocess import files, one_cell, run

FEW: dict[str, Any] = {"training.steps": 5, "training.checkpoint_seconds": 0}
LOOKED: dict[str, Any] = {
    "mechanism.max_windows": 4,
    "mechanism.max_tokens": 64,
    "mechanism.multiple": 4,
}


@pytest.fixture
def trained(tiny: Path, tmp_path: Path) -> Path:
    """A study that trained Baseline and KNA with seed 0."""
    out = tmp_path / "trained"
    request = Request(str(tiny), ("Baseline", "KNA"), ("as is",), (0,), out=out, changes=FEW)
    run(keynorm.STUDY, keynorm.resolve(request))
    return out


def looking(tiny: Path, out: Path, changes: dict[str, Any] = FEW, **asked: Any) -> Sweep:
    """A study that looks into the models of Baseline and KNA."""
    asked = {"variants": ("Baseline", "KNA"), "seeds": (0,), **asked}
    return resolve(Request(str(tiny), out=out, changes={**LOOKED, **changes}, **asked))


def test_what_is_taken_over_gives_what_training_gives(
    tiny: Path, tmp_path: Path, trained: Path
) -> None:
    run(STUDY, looking(tiny, tmp_path / "whole"))
    sweep = looking(tiny, tmp_path / "taken")
    found = taking.find(sweep, trained)
    assert set(found.runs) == {"Baseline seed 0", "KNA seed 0"}
    assert not found.others
    taking.take(sweep, found)
    assert make_plan(sweep).finished == 2
    assert taking.find(sweep, trained).lines() == []
    place = sweep.out / "cells" / "KNA" / "seed0"
    assert not (place / "evaluations").exists()
    before = (place / "timing.jsonl").read_bytes()
    run(STUDY, sweep)
    assert (place / "timing.jsonl").read_bytes() == before
    assert files(tmp_path / "taken") == files(tmp_path / "whole")


def test_only_the_same_settings_are_taken(tiny: Path, tmp_path: Path, trained: Path) -> None:
    more = looking(tiny, tmp_path / "more", seeds=(0, 1))
    found = taking.find(more, trained)
    assert set(found.runs) == {"Baseline seed 0", "KNA seed 0"}
    assert set(found.others) == {"Baseline seed 1", "KNA seed 1"}
    assert any("trained here: KNA seed 1, as" in line for line in found.lines())
    longer = looking(tiny, tmp_path / "longer", {**FEW, "training.steps": 6})
    with pytest.raises(InputError, match="steps is 5 there and 6 here"):
        taking.find(longer, trained)
    with pytest.raises(InputError, match="holds no cells"):
        taking.find(more, tmp_path)


def test_a_study_that_calls_its_cells_otherwise(tiny: Path, tmp_path: Path, trained: Path) -> None:
    """`factors` has preset-KNA where `keynorm` has KNA: the settings tell that they are one.

    A run of another kind in that folder is passed over.
    """
    other = trained / "cells" / "Another" / "seed0"
    shutil.copytree(trained / "cells" / "KNA" / "seed0", other)
    stored = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**stored, "kind": "translation"}))
    asked = Request(
        str(tiny), ("preset", "base-130"), seeds=(0,), out=tmp_path / "factors", changes=FEW
    )
    sweep = factors.resolve(asked)
    found = taking.find(sweep, trained)
    assert found.runs == {
        f"preset-{row} seed 0": trained / "cells" / row / "seed0" for row in ("Baseline", "KNA")
    }
    assert set(found.others.values()) == {"no run there has its settings"}
    taking.take(sweep, found)
    for row in ("Baseline", "KNA"):
        weights = Path("seed0", "model", "model.safetensors")
        taken = (sweep.out / "cells" / f"preset-{row}" / weights).read_bytes()
        assert taken == (trained / "cells" / row / weights).read_bytes()
    assert make_plan(sweep).finished == 2


def test_what_was_begun_is_left_alone(tiny: Path, tmp_path: Path, trained: Path) -> None:
    sweep = looking(tiny, tmp_path / "begun")
    assert one_cell(STUDY, sweep, sweep.cells[0]) == 0
    assert set(taking.find(sweep, trained).runs) == {"KNA seed 0"}


def test_a_run_that_has_not_ended_or_was_damaged(tiny: Path, tmp_path: Path, trained: Path) -> None:
    sweep = looking(tiny, tmp_path / "out")
    run_of = trained / "cells" / "KNA" / "seed0"
    found = taking.find(sweep, trained)

    kept = (run_of / "corpus.json").read_text()
    (run_of / "corpus.json").write_text(kept.replace('"', "'", 2))
    with pytest.raises(InputError, match=r"corpus\.json is damaged"):
        taking.take(sweep, found)
    (run_of / "corpus.json").write_text(kept)
    found = taking.find(sweep, trained)

    weights = run_of / "model" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(InputError, match=r"model\.safetensors"):
        taking.take(sweep, found)
    assert not (sweep.out / "cells" / "KNA").exists() or not any(
        (sweep.out / "cells" / "KNA").iterdir()
    )
    weights.write_bytes(whole)

    status = json.loads((run_of / "status.json").read_text())
    (run_of / "status.json").write_text(json.dumps({**status, "state": "running"}))
    assert "has not ended" in taking.find(sweep, trained).others["KNA seed 0"]


def test_a_run_on_another_text_is_refused(tiny: Path, tmp_path: Path, trained: Path) -> None:
    record = trained / "cells" / "Baseline" / "seed0" / "corpus.json"
    status = record.with_name("status.json")
    record.write_text(json.dumps({"fingerprint": "0" * 64, "sources": {}}))
    stored = json.loads(status.read_text())
    del stored["files"]["corpus.json"]
    status.write_text(json.dumps(stored))
    sweep = looking(tiny, tmp_path / "out")
    found = taking.find(sweep, trained)
    with pytest.raises(InputError, match="another text"):
        taking.take(sweep, found)
    shutil.rmtree(trained / "cells" / "KNA")
    assert set(taking.find(sweep, trained).others) == {"KNA seed 0"}

"""A trained Baseline that continues as another score: where it starts; stopping is harmless."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from normattn.errors import InputError
from normattn.io import read_object
from normattn.lab.data import prepare_tokens
from normattn.lab.studies.retrofit import STUDY, evaluation_sets, resolve
from normattn.lab.sweep.run import Request
from normattn.lab.training import TrainingConfig
from normattn.lab.training.init_from import new_model
from normattn.models.pretrained import load_model
from studies.inprocess import files, run, run_killed

FEW: dict[str, Any] = {
    "training.steps": 5,
    "training.checkpoint_seconds": 0,
    "evaluation.max_windows": 3,
    "continued.steps": 4,
    "continued.keep": [1, 4],
    "continued.warmup_steps": 1,
}


def test_the_branches_start_with_the_trained_weights_and_end_the_same_when_stopped(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = resolve(Request(str(tiny), out=tmp_path / "whole", changes=FEW))
    run(STUDY, whole)
    broken = resolve(Request(str(tiny), out=tmp_path / "broken", changes=FEW))
    assert run_killed(STUDY, broken, 17, monkeypatch) > 1
    assert files(tmp_path / "broken") == files(tmp_path / "whole")

    facts = json.loads(files(tmp_path / "whole")["table.json"])["tables"]["table"]
    names = ("as Baseline", "as KNA", "as QKRMSNorm")
    assert {(fact["row"], fact["step"]) for fact in facts} == {
        (name, str(step)) for name in names for step in (0, 1, 4)
    }
    base = load_model(tmp_path / "whole" / "cells" / "Baseline" / "seed0" / "model")
    for name in names:
        place = tmp_path / "whole" / "continued" / "Baseline" / "seed0" / name[3:]
        config = TrainingConfig.parse(read_object(place / "config.json")["config"])
        fresh = new_model(config.model, config.continued)
        assert fresh.config.score.variant_name == name[3:]
        weights = fresh.state_dict()
        assert all(torch.equal(weights[key], value) for key, value in base.state_dict().items())
        added = weights.keys() - base.state_dict().keys()
        assert bool(added) == (name == "as QKRMSNorm")
        last = load_model(place / "kept" / "step-00000004")
        assert last.config == config.model
        read = evaluation_sets(prepare_tokens(config.data), 8, whole.cells[0].evaluation)[-1]  # type: ignore[attr-defined]
        correct = last.token_scores(torch.from_numpy(read.windows)).correct[:, read.scored]
        (fact,) = (f for f in facts if (f["row"], f["step"]) == (name, "4"))
        assert fact["far"]["value"] == pytest.approx(100 * float(correct.double().mean()))


def test_bad_input(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="chooses its own methods"):
        resolve(Request(str(tiny), methods=("YaRN",)))
    with pytest.raises(InputError, match="unknown score part 'KNO'"):
        resolve(Request(str(tiny), variants=("KNO",)))
    sweep = resolve(Request(str(tiny), variants=("KNA",), out=tmp_path, changes=FEW))
    run(STUDY, sweep)
    place = tmp_path / "continued" / "Baseline" / "seed0" / "KNA"
    fields = read_object(place / "config.json")["config"]
    fields["continued"]["trained"] = "CosA"
    config = TrainingConfig.parse(fields)
    with pytest.raises(InputError, match="has other settings than `model` says"):
        new_model(config.model, config.continued)

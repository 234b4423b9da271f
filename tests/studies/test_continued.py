"""Training that goes on at a longer length: what goes on, and that stopping changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from normattn.cli.reporting import report
from normattn.errors import InputError
from normattn.io import read_object
from normattn.lab.data import prepare_tokens
from normattn.lab.studies.continue_ import STUDY, evaluation_sets, resolve
from normattn.lab.sweep.reading import KeptStage
from normattn.lab.studies.preset import EvaluationSettings
from normattn.lab.sweep.stages import TrainStage
from normattn.lab.sweep.run import Request
from normattn.lab.training import TrainingConfig
from normattn.models.pretrained import load_model
from studies.inprocess import files, run, run_killed

FEW: dict[str, Any] = {
    "training.steps": 5,
    "training.checkpoint_seconds": 0,
    "evaluation.max_windows": 3,
    "continued.steps": 4,
    "continued.keep": [1, 4],
    "continued.warmup_steps": 1,
    "continued.read": [1, 4, 8],
}


def test_what_goes_on_and_how() -> None:
    sweep = resolve(Request("laptop"))
    trained = {}
    for cell in sweep.cells:
        stages = [stage for stage in sweep.stages(cell) if isinstance(stage, TrainStage)]
        found = [stage.config for stage in stages[1:]]
        trained[cell.variant] = [each for each in found if isinstance(each, TrainingConfig)]
    methods = {
        variant: [each.continued.method for each in configs if each.continued]
        for variant, configs in trained.items()
    }
    assert methods == {
        "Baseline": ["", "PI(factor=4)", "ABF", "NTK(factor=4)", "YaRN(factor=4)"],
        "KNA": [""],
        "KNA-logn": [""],
        "CosA": [""],
    }
    config = trained["Baseline"][1]
    # As many tokens a step as before, at the new length; the score keeps what it was trained with.
    assert (config.batch_size, config.sequence_length, config.model.train_length) == (16, 256, 64)
    assert str(config.model.score) == "Baseline@64"
    assert config.keep[-1] == config.steps
    assert {each.optimiser.lr for configs in trained.values() for each in configs} == {1e-3}


def test_stopped_anywhere_it_is_the_same(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("normattn.lab.studies.continue_.VARIANTS", ("Baseline", "KNA"))
    whole = resolve(Request(str(tiny), out=tmp_path / "whole", changes=FEW))
    run(STUDY, whole)
    broken = resolve(Request(str(tiny), out=tmp_path / "broken", changes=FEW))
    assert run_killed(STUDY, broken, 23, monkeypatch) > 1
    assert files(tmp_path / "broken") == files(tmp_path / "whole")
    assert all(stage.is_done() for cell in whole.cells for stage in whole.stages(cell))

    page = files(tmp_path / "whole")
    assert b"continued" in page["figures.txt"]
    facts = json.loads(page["table.json"])["tables"]["table"]
    names = (*(f"Baseline{way}" for way in ("", "-PI", "-ABF", "-NTK", "-YaRN")), "KNA")
    assert {(fact["row"], fact["step"]) for fact in facts} == {
        (name, str(step)) for name in names for step in (0, 1, 4)
    }
    check_values(whole.out, facts)
    check_gathered(whole.out / "continued", tmp_path / "gathered", facts)


def check_gathered(runs: Path, out: Path, facts: list[dict[str, Any]]) -> None:
    """The runs' own page has each branch at its end, under a name of its own."""
    branches = {
        run.parent: f"{run.parents[2].name}, {run.parent.name}"
        for run in runs.glob("*/*/*/status.json")
    }
    report([f"{label}={run}" for run, label in branches.items()], out)
    page = json.loads((out / "table.json").read_text())
    assert "reproduce reading" not in (out / "table.md").read_text()
    found = {row["row"]: row for row in page["tables"]["table"]}
    last = {fact["row"]: fact for fact in facts if fact["step"] == "4"}
    assert len(found) == len(last) == 6
    for name, branch in (
        ("KNA", "KNA, as it is"),
        ("Baseline", "Baseline, as it is"),
        ("Baseline-PI", "Baseline, PI(factor=4)-PI"),
    ):
        assert found[branch]["non_repeated"]["value"] == last[name]["accuracy_64"]["value"]


def check_values(out: Path, facts: list[dict[str, Any]]) -> None:
    """Some values once more, from the saved models alone."""
    for name, folder, method in (
        ("KNA", "KNA/seed0/as it is", ""),
        ("Baseline-PI", "Baseline/seed0/PI(factor=4)", "PI(factor=4)"),
    ):
        place = out / "continued" / folder
        fields = read_object(place / "config.json")["config"]
        model = load_model(place / "kept" / "step-00000004")
        data = prepare_tokens(TrainingConfig.parse(fields).data)
        settings = EvaluationSettings(multiples=(1, 4, 8), max_windows=3)
        longest = evaluation_sets(data, 8, settings)[-1]
        with model.using(method):
            scores = model.token_scores(torch.from_numpy(longest.windows))
        found = next(f for f in facts if (f["row"], f["step"]) == (name, "4"))
        assert found["loss_64"]["value"] == pytest.approx(float(scores.loss.mean()), rel=1e-5)
        assert found["accuracy_64"]["value"] == pytest.approx(
            100 * float(scores.correct.double().mean())
        )


def test_bad_input(tiny: Path) -> None:
    with pytest.raises(InputError, match="keep must end with the last step 200"):
        resolve(Request(str(tiny), changes={"continued.keep": [10]}))
    with pytest.raises(InputError, match="read must rise from 1"):
        resolve(Request(str(tiny), changes={**FEW, "continued.read": [2, 4]}))
    with pytest.raises(InputError, match=r"give continued\.batch_size"):
        resolve(Request(str(tiny), changes={**FEW, "continued.multiple": 3}))
    with pytest.raises(InputError, match="reads no window settings"):
        resolve(Request(str(tiny), changes={"window.shares": [1.0]}))


def test_a_stage_is_not_done_before_it_is_begun(tiny: Path, tmp_path: Path) -> None:
    sweep = resolve(Request(str(tiny), out=tmp_path / "out", changes=FEW))
    kept = [s for s in sweep.stages(sweep.cells[0]) if isinstance(s, KeptStage)]
    assert len(kept) == 5
    assert not any(stage.is_done() for stage in kept)

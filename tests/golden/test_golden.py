"""What the record holds, the product still gives (`record.py` made it, and says how).

A faster operation may round otherwise; a changed meaning fails.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from golden import record
from normattn.io import read_object
from normattn.lab.studies import find
from normattn.lab.studies.language import TextRun, evaluation_sets
from normattn.lab.studies.realformer_runs import EncoderRun, held_out
from normattn.lab.sweep.runner import read_run
from normattn.score import ScoreSpec
from normattn.score.parts.base import parts
from thorough import few

FLOAT64 = 1e-9
LOSS = 1e-4  # Losses in float32: relative.
STEPS = 12
"""So many are compared each time; with `--thorough` 100, of every preset.

Also each time: two of the studies, and each third family; with `--thorough` all.
"""
POINTS, NUMBER = 1.0, 0.02
"""Numbers of smoke tables: percentages of a few hundred tokens, by points; others, relative."""
TESTED_STUDIES: dict[str, Any] = {"keynorm": ("--variants", "Baseline,KNA"), "retrofit": ()}
"""The studies that are run each time, keynorm with two of its three variants."""
TRAINED = ("keynorm/quick", "keynorm/workstation", "realformer/gpu-base", "rmsnorm/gpu")
"""The presets that are trained each time, one of each task but translation."""
LOGITS = 1e-4  # Of transformers' models in float32.
# Of models that apply their layers again and again, which adds up what processors round apart:
RECURRENT = {"hrm_text": 5e-3}


SCORES: dict[str, dict[str, list[list[float]]]] = record.recorded("scores")
FAMILIES: dict[str, dict[str, list[list[float]] | None]] = record.recorded("families")
LOSSES: dict[str, dict[str, Any]] = record.recorded("losses")
STUDIES: dict[str, Any] = record.recorded("studies")


@pytest.mark.parametrize("score", SCORES["causal"])
def test_a_score_reads_and_decodes_as_recorded(score: str) -> None:
    model = record.scored_model(score)
    expected = torch.tensor(SCORES["causal"][score], dtype=torch.float64)
    assert float(expected.std()) > 1e-3
    torch.testing.assert_close(record.full_logits(model), expected, rtol=0, atol=FLOAT64)
    torch.testing.assert_close(record.decoded_logits(model), expected, rtol=0, atol=FLOAT64)


@pytest.mark.parametrize("score", SCORES["encoder"])
def test_a_score_of_an_encoder_is_as_recorded(score: str) -> None:
    expected = torch.tensor(SCORES["encoder"][score], dtype=torch.float64)
    torch.testing.assert_close(record.encoder_logits(score), expected, rtol=0, atol=FLOAT64)


def test_the_record_holds_every_part_preset_and_study() -> None:
    """Of two of the instance norms, LongRoPE and Packed, other tests know the numbers."""
    scores = SCORES["causal"].keys() - record.STACKS.keys() | SCORES["encoder"].keys()
    named = {part.name for score in scores for part in ScoreSpec.parse(score).parts}
    missing = {"QInstanceNorm", "KInstanceNorm", "LongRoPE", "Packed"}
    assert parts().keys() - named == missing
    assert set(LOSSES) == set(record.TRAININGS)
    assert set(STUDIES["tables"]) == set(record.STUDIES)


@pytest.mark.parametrize("family", few(FAMILIES, [*FAMILIES][::3].__contains__))
def test_an_extended_family_gives_the_recorded_logits(family: str) -> None:
    within: dict[str, Any] = dict.fromkeys(("rtol", "atol"), RECURRENT.get(family, LOGITS))
    for method, expected in FAMILIES[family].items():
        logits = record.family_logits(family, method)
        assert (logits is None) == (expected is None), method
        if expected is not None:
            torch.testing.assert_close(torch.tensor(logits), torch.tensor(expected), **within)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the corpora of the trainings."""
    made = tmp_path_factory.mktemp("golden")
    return record.corpora(made)


@pytest.mark.parametrize("preset", TRAINED)
def test_a_preset_begins_as_recorded(preset: str, folder: Path) -> None:
    losses = record.few_losses(preset, folder, STEPS)
    assert_close(losses, LOSSES[preset]["losses"][:STEPS])
    assert read_by(preset, folder) == LOSSES[preset]["tokens"]


def assert_close(losses: list[float], recorded: list[float]) -> None:
    for step, (loss, expected) in enumerate(zip(losses, recorded, strict=True)):
        assert math.isclose(loss, expected, rel_tol=LOSS), f"step {step}: {loss}, not {expected}"


def read_by(preset: str, folder: Path) -> list[str]:
    """The digests of what the training's model is measured on."""
    cells = record.out_of(preset, folder).glob("jobs/*/seed0/cell.json")
    runs = (read_run(path, find(read_object(path)["study"])) for path in cells)
    (run,) = (run for run in runs if run.training["steps"] == 100)
    config = run.training_config
    data = config.prepare()
    if isinstance(run, TextRun):
        sets = evaluation_sets(data, config.model.train_length, run.evaluation)
        return sorted(each.fingerprint for each in sets)
    read = held_out(data, config, run.evaluation) if isinstance(run, EncoderRun) else data
    return [read.fingerprint]


@pytest.mark.thorough
@pytest.mark.parametrize("preset", record.TRAININGS)
def test_a_preset_trains_as_recorded(preset: str, tmp_path: Path) -> None:
    ours, recorded = record.first_losses(preset, record.corpora(tmp_path)), LOSSES[preset]
    assert ours["tokens"] == recorded["tokens"]
    assert len(recorded["losses"]) == 100
    assert_close(ours["losses"], recorded["losses"])


@pytest.mark.skipif(
    sys.version.split()[0] != STUDIES["python"],
    reason=f"the text is the standard library of Python {STUDIES['python']}",
)
@pytest.mark.parametrize("study", few(record.STUDIES, TESTED_STUDIES.__contains__))
def test_a_study_gives_the_recorded_numbers(study: str, tmp_path: Path, thorough: bool) -> None:
    chosen = () if thorough else TESTED_STUDIES[study]
    tables = record.study_numbers(study, tmp_path, *chosen)
    for table, rows in STUDIES["tables"][study].items():
        for row, numbers in rows.items():
            # Training with ×32 is unstable: rounding alone moves it.
            if "×32" in row or (chosen and row.startswith("CosA")):
                continue
            for column, expected in numbers.items():
                value = tables[table][row][column]
                within = max(POINTS, NUMBER * abs(expected))
                assert abs(value - expected) <= within, f"{table}, {row}, {column}: {value}"

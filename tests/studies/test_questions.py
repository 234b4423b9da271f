"""What beside the norm decides: the rows, the differences, the sentences that they test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

import normattn
from normattn.errors import InputError
from normattn.lab.studies.questions import NAME, QUESTIONS, STUDY, Question, resolve
from normattn.lab.sweep.run import Request
from normattn.score import ScoreSpec
from studies.inprocess import files, run

FEW: dict[str, Any] = {"training.steps": 4, "evaluation.max_windows": 6}


def test_every_question_can_be_asked_of_every_preset() -> None:
    for preset, seeds in (("smoke", 1), ("quick", 1), ("laptop", 1), ("workstation", 3)):
        sweep = resolve(Request(preset))
        assert len(sweep.cells) == 17 * seeds
        assert sweep.out == Path(f"runs/{NAME}-{preset}")


def test_a_pair_differs_in_one_part_of_the_score() -> None:
    for question in QUESTIONS.values():
        for row, other in question.pairs:
            ours, theirs = (set(ScoreSpec.parse(name).parts) for name in (row, other))
            assert len(ours - theirs) == 1, row
            assert len(theirs - ours) <= 1, row


def test_a_row_is_named_as_its_measurements_are() -> None:
    """By its printed name: a pair under another one would be trained and left out of the page."""
    gain = QUESTIONS["gain"]
    asked = Question("?", (("CosA(c=2.0)", "CosA(c=4)"),), gain.at_l, gain.change)
    assert asked.rows == ("CosA", "CosA(c=2)")
    for question in QUESTIONS.values():
        assert [ScoreSpec.parse(row).text for row in question.rows] == list(question.rows)


def test_keynorm_is_the_rms_norm_without_a_gain() -> None:
    q, k, v = torch.randn(3, 2, 3, 17, 16, dtype=torch.float64)
    ours = normattn.attention(q, k, v, "KRMSNorm(gain=false,eps=0)")
    assert torch.allclose(ours, normattn.attention(q, k, v, "KNA"), atol=1e-9)


def test_differences_are_those_of_the_frame(tiny: Path, tmp_path: Path) -> None:
    sweep = resolve(
        Request(
            str(tiny), variants=("gain", "residual"), seeds=(0, 1, 2), out=tmp_path, changes=FEW
        )
    )
    run(STUDY, sweep)
    page = files(tmp_path)
    found = json.loads(page["table.json"])
    frame = pl.read_parquet(tmp_path / "page" / "measurements.parquet")
    pairs = [pair for name in ("gain", "residual") for pair in QUESTIONS[name].pairs]
    rows = found["tables"]["table"]
    assert [row["row"] for row in rows] == [f"{row} − {other}" for row, other in pairs]

    def accuracy(row: str, protocol: str, length: int) -> float:
        at = frame.filter(row=row, protocol=protocol, length=length, statistic="accuracy")
        assert at["seed"].n_unique() == 3
        return 100 * float(at["sum"].sum()) / float(at["of"].sum())

    def change(row: str) -> float:
        return accuracy(row, "last_segment", 32) - accuracy(row, "last_segment", 8)

    for (row, other), fact in zip(pairs, rows, strict=True):
        at_l = accuracy(row, "train_length", 8)
        assert fact["at_l"]["value"] == pytest.approx(at_l)
        less = accuracy(other, "train_length", 8)
        assert fact["at_l_difference"]["value"] == pytest.approx(at_l - less)
        natural = [accuracy(name, "non_repeated", 32) for name in (row, other)]
        assert fact["natural_difference"]["value"] == pytest.approx(natural[0] - natural[1])
        assert fact["change"]["value"] == pytest.approx(change(row))
        assert fact["change_difference"]["value"] == pytest.approx(change(row) - change(other))
    claims = [finding["claim"] for finding in found["claims"]]
    assert len(claims) == 2 * len(pairs)
    assert "KRMSNorm loses more from L to the longest context than KNA" in claims
    assert sum("less than" in claim for claim in claims) == 4
    scores = [row["row"] for row in found["tables"]["scores"]]
    assert scores[:2] == ["Baseline", "KNA"]
    copying = next(line for line in page["table.md"].decode().splitlines() if "Copying is" in line)
    assert f"learned: of {len(scores)} from " in copying


def test_bad_input(tiny: Path) -> None:
    with pytest.raises(InputError, match="did you mean gain"):
        resolve(Request(str(tiny), variants=("gains",)))
    with pytest.raises(InputError, match="chooses its own methods"):
        resolve(Request(str(tiny), methods=("YaRN",)))

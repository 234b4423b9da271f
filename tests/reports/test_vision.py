"""The page of the Vision Transformers: rows, paired differences, the ladder, what ended in NaN."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from normattn.errors import InputError
from normattn.reports.bootstrap import Bootstrap
from normattn.reports.vision import vision_report
from normattn.reports.vision_record import (
    VisionDivergence,
    VisionRecord,
    read_vision,
    write_vision,
)
from normattn.reports.vision_rows import vision_rows

IMAGES = 60
DRAWN = Bootstrap(resamples=200)


def record(score: str, seed: int = 0, share: float = 0.7, rate: float = 1.0) -> VisionRecord:
    """Made-up results of which about `share` are right."""
    drawn = np.random.default_rng([seed, 3]).uniform(size=IMAGES)
    correct = (drawn < share).astype(int)
    return VisionRecord(
        score=score,
        spec=f"{score}-NoPE@17",
        rate=rate,
        learning_rate=1e-3 * rate,
        seed=seed,
        weights=f"{score}{seed}",
        data="d",
        split="test",
        steps=10,
        parameters=1000,
        tokens_per_image=17,
        classes=10,
        loss=tuple((2 - correct - drawn / 2).tolist()),
        correct=tuple(correct.tolist()),
        largest=10.0 * rate + seed,
        entropy_share=0.5,
    )


def test_rows_and_differences() -> None:
    records = [record(score, seed, share) for seed in (1, 0) for score, share in SHARES.items()]
    rows = vision_rows(records, [], ("QKRMSNorm",), DRAWN)
    assert [row.score for row in rows] == ["Baseline", "QKRMSNorm", "KNA"]
    base, rms, kna = rows
    ours = np.mean([each.correct for each in records if each.score == "KNA"])
    theirs = np.mean([each.correct for each in records if each.score == "Baseline"])
    assert kna.values["accuracy"] is not None
    assert kna.values["accuracy"].value == pytest.approx(100 * ours)
    assert kna.values["accuracy"].seeds == 2
    assert kna.values["accuracy"].documents == IMAGES
    change = kna.changes["accuracy"]
    assert change is not None
    assert change.value == pytest.approx(100 * (ours - theirs))
    assert change.above_zero
    same = rms.changes["accuracy"]
    assert same is not None
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)
    assert base.changes["accuracy"] is None


SHARES = {"KNA": 0.95, "Baseline": 0.7, "QKRMSNorm": 0.7}


def test_the_page_and_its_files(tmp_path: Path) -> None:
    records = [record(score, seed, share) for seed in (0, 1) for score, share in SHARES.items()]
    records += [record("KNA", seed, 0.9, rate=4.0) for seed in (0, 1)]
    records += [record("Baseline", 1, 0.2, rate=4.0)]
    ended = [
        VisionDivergence("Baseline", 4.0, 4e-3, 0, 7, "blocks.0"),
        VisionDivergence("QNA", 1.0, 1e-3, 0, 5, "blocks.1"),
    ]
    figures = vision_report(
        records, ended, tmp_path, setting={"images": "made up"}, bootstrap=DRAWN
    )
    assert sorted(path.name for path in figures) == [
        *("vision_by_score.png", "vision_by_score.svg"),
        *("vision_ladder.png", "vision_ladder.svg"),
    ]
    text = (tmp_path / "vision.md").read_text()
    for said in (
        "- images: made up",
        "60 images of the test split, seeds 0, 1; 10 classes, 17 tokens an image",
        "| QNA       |",
        "diverged at step 5",
        "×4 (0.004)",
        "(1 of 2 seeds ended in NaN)",
        "Baseline, seed 0 at ×4 of the learning rate: diverged at step 7; the first value that",
        "Of 6 differences to Baseline 4 exclude 0",
        "- KNA: accuracy +",
        "- KNA at ×4: accuracy +",
        "41; 0.50",
    ):
        assert said in text, said
    rows = json.loads((tmp_path / "vision.json").read_text())["rows"]
    assert {(row["score"], row["rate"]) for row in rows} == {
        *(("Baseline", 1.0), ("KNA", 1.0), ("QKRMSNorm", 1.0), ("QNA", 1.0)),
        *(("Baseline", 4.0), ("KNA", 4.0)),
    }
    lines = list(csv.DictReader((tmp_path / "vision.csv").open()))
    assert len(lines) == 6
    assert lines[0]["score"] == "Baseline"
    before = {path.name: path.read_bytes() for path in (*figures, tmp_path / "vision.md")}
    vision_report(
        records[::-1], ended[::-1], tmp_path, setting={"images": "made up"}, bootstrap=DRAWN
    )
    after = {path.name: path.read_bytes() for path in (*figures, tmp_path / "vision.md")}
    assert after == before


def test_a_record_is_what_was_written(tmp_path: Path) -> None:
    written = record("KNA")
    write_vision(tmp_path / "vision.json", written)
    assert read_vision(tmp_path / "vision.json") == written
    (tmp_path / "vision.json").write_text("{}")
    with pytest.raises(InputError, match=r"vision.json is no record of images"):
        read_vision(tmp_path / "vision.json")
    with pytest.raises(ValueError, match="correct is not of 60 images"):
        VisionRecord(**{**written.model_dump(), "correct": (1,)})


def test_what_cannot_be_compared() -> None:
    with pytest.raises(InputError, match="nothing to report"):
        vision_rows([], [])
    other = record("KNA").model_copy(update={"data": "e"})
    with pytest.raises(InputError, match="different images"):
        vision_rows([record("Baseline"), other], [])

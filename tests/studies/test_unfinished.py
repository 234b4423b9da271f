"""The page of a study that is still training: what is there, or one sentence; never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from normattn.errors import InputError
from normattn.lab.stats import measurements
from normattn.lab.studies import OF_COMMANDS, find
from thorough import few, smallest_of_each_study

RESULTS = Path(__file__).parents[2] / "results"
TRAINING = pl.col("protocol") == "training"


def _trained() -> list[Path]:
    """Published folders of studies that train."""
    folders = sorted(file.parent for file in RESULTS.glob("*/" + measurements.FILE))
    kinds = {f: json.loads((f / "config.json").read_text())["kind"] for f in folders}
    return [folder for folder in folders if kinds[folder] not in OF_COMMANDS]


@pytest.mark.parametrize(
    "folder",
    few(_trained(), smallest_of_each_study(_trained()).__contains__),
    ids=lambda folder: folder.name,
)
@pytest.mark.parametrize("still", ["the first row", "all"])
def test_what_is_training_still_stands_in_no_way(
    folder: Path, still: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss curves are there before anything is measured, of one row or of all."""
    monkeypatch.setattr("normattn.lab.report.charts.png", lambda figure: b"drawn elsewhere")
    measured = measurements.read(folder / measurements.FILE)
    config = json.loads((folder / "config.json").read_text())["config"]
    second = measured["row"].unique(maintain_order=True)[1:2]
    kept = TRAINING if still == "all" else TRAINING | pl.col("row").is_in(second)
    study = find(measured["study"][0])
    said = ""
    try:
        study.report(measured.filter(kept), tmp_path, config)
    except InputError as error:
        said = str(error)
    assert "nothing to report" in said or (tmp_path / "table.md").read_text()

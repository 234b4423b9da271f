"""A published folder with other labels or settings than were written: a page, or one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import polars as pl
import pytest

from normattn.cli.app import main
from normattn.lab.stats import measurements
from thorough import few

RESULTS = Path(__file__).parents[2] / "results"
OTHER = "§ another"


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normattn.lab.report.charts.png", lambda figure: b"drawn elsewhere")


def _copy(name: str, folder: Path) -> pl.DataFrame:
    folder.mkdir()
    shutil.copy(RESULTS / name / "config.json", folder)
    return measurements.read(RESULTS / name / measurements.FILE)


def _report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", str(folder), "--out", str(folder / "again")])
    said = capsys.readouterr().err
    assert "Traceback" not in said
    if ended.value.code == 0:
        assert (folder / "again" / "table.json").is_file()
    else:
        assert ended.value.code == 2
        assert said.strip().splitlines()[-1].startswith("normattn: ")


CHANGES = {
    "row": pl.lit(OTHER).alias("row"),
    "protocol": pl.lit(OTHER).alias("protocol"),
    "statistic": pl.lit(OTHER).alias("statistic"),
    "method": pl.lit(OTHER).alias("method"),
    "training length": pl.lit(0, dtype=pl.Int64).alias("train_length"),
    "nothing counted": pl.lit(0.0).alias("of"),
    "tiny": pl.lit(5e-324).alias("sum"),
}


@pytest.mark.parametrize(
    ("name", "change"),
    few(
        [*(("window-laptop", change) for change in CHANGES), ("mechanism-workstation", "row")],
        lambda case: case[1] in ("row", "training length", "nothing counted"),
    ),
)
def test_changed_measurements(
    name: str, change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / name
    measured = _copy(name, folder).with_columns(CHANGES[change])
    names = [column for column in measured.columns if column not in ("sum", "of")]
    measurements.write(
        folder / measurements.FILE, measured.unique(names, keep="first", maintain_order=True)
    )
    _report(folder, capsys)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("changed", [1, 2]), ("asked", {"a": 1}), ("preset", [])],
)
def test_changed_settings(
    setting: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "window-laptop"
    measured = _copy("window-laptop", folder)
    measurements.write(folder / measurements.FILE, measured)
    stored = json.loads((folder / "config.json").read_text())
    stored["config"][setting] = value
    (folder / "config.json").write_text(json.dumps(stored))
    _report(folder, capsys)


def test_a_bug_of_the_library_is_no_fault_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "window-laptop"
    measurements.write(folder / measurements.FILE, _copy("window-laptop", folder))

    def broken(*given: object, **named: object) -> None:
        raise NameError("name 'nobody' is not defined")

    monkeypatch.setattr("normattn.lab.studies.base.context", broken)
    with pytest.raises(NameError, match="nobody"):
        main(["report", str(folder), "--out", str(folder / "again")])

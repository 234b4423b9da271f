"""The window study: what it asks for, and that stopping it anywhere changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from normattn.cli.reporting import report
from normattn.errors import InputError
from normattn.lab.studies.window import STUDY, resolve
from normattn.lab.studies.language import ReadCell, TextConfig
from normattn.lab.sweep.paths import RunPaths
from normattn.lab.sweep.run import Request
from studies.inprocess import files, run, run_killed

FEW = {
    "training.steps": 6,
    "training.checkpoint_seconds": 0,
    "evaluation.max_windows": 4,
    "window.shares": [0.5, 1.0],
}


def test_the_windows_of_the_source() -> None:
    sweep = resolve(Request("laptop"))
    methods = {}
    for cell in sweep.cells:
        assert isinstance(cell, ReadCell)
        methods[cell.variant] = cell.methods
    windows = [f"ReRoPE(window={size})" for size in (8, 16, 32, 48, 64)]
    assert methods["Baseline-logn"] == ("as is", *windows)
    assert methods["Baseline"] == (
        *("as is", *windows),
        *("logn+", *(f"{window}-logn+" for window in windows)),
    )
    assert isinstance(sweep.config, TextConfig)
    assert sweep.config.evaluation.multiples == (8,)
    assert sweep.out == Path("runs/window-laptop")


def test_a_report_says_what_is_not_finished_and_which_records_are_gone(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "study"
    sweep = resolve(Request(str(tiny), out=out, changes=FEW))
    run(STUDY, sweep)
    config = {"kind": STUDY.name, "config": sweep.config.model_dump(mode="json")}
    (out / "config.json").write_text(json.dumps(config))
    report([out], tmp_path / "again")
    assert (tmp_path / "again" / "table.md").is_file()
    assert not capsys.readouterr().err

    done = RunPaths.of(out, "Baseline", 0).done
    done.rename(done.with_name("aside.json"))
    report([out], tmp_path / "again")
    assert capsys.readouterr().err == (
        f"normattn: of {out} not finished, and on the page as far as measured: Baseline seed0\n"
    )
    done.with_name("aside.json").rename(done)

    next(out.glob("cells/Baseline/seed0/evaluations/*.parquet")).unlink()
    with pytest.raises(InputError, match=r"Baseline/seed0 was finished, but records of its eval"):
        report([out], tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_stopped_anywhere_it_is_the_same(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = {"preset": str(tiny), "changes": FEW}
    run(STUDY, resolve(Request(out=tmp_path / "whole", **request)))  # type: ignore[arg-type]
    broken = resolve(Request(out=tmp_path / "broken", **request))  # type: ignore[arg-type]
    assert run_killed(STUDY, broken, 17, monkeypatch) > 1
    assert files(tmp_path / "broken") == files(tmp_path / "whole")

    page = files(tmp_path / "whole")
    rows = json.loads(page["table.json"])["tables"]["table"]
    assert [(row["row"], row["window"]) for row in rows] == [
        *(("no log-n", None), ("no log-n", "4"), ("no log-n", "8")),
        *(("logn+", None), ("logn+", "4"), ("logn+", "8")),
        *(("logn", None), ("logn", "4"), ("logn", "8")),
    ]
    assert [row["share"] for row in rows[:3]] == [None, "1/2", "1"]
    assert rows[0]["cost"] is None
    # At w = L no relative position of the training length is touched.
    assert rows[2]["cost"]["value"] == 0.0
    assert b"accuracy_by_window" in page["figures.txt"]
    assert "gains.csv" in page


def test_bad_input(tiny: Path) -> None:
    with pytest.raises(InputError, match="same window twice"):
        resolve(Request(str(tiny), changes={"window.shares": [0.1, 0.12]}))
    with pytest.raises(InputError, match="shares must rise"):
        resolve(Request(str(tiny), changes={"window.shares": [1.0, 0.5]}))
    with pytest.raises(InputError, match="chooses its own methods"):
        resolve(Request(str(tiny), methods=("YaRN",)))

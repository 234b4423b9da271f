"""Several models and texts on one page: each row is what the page of its own folder says."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from normattn.cli.app import main
from normattn.errors import InputError
from normattn.lab.report.page import context
from normattn.lab.runs.directory import FORMAT
from normattn.lab.stats import measurements
from normattn.lab.studies import extend
from studies.test_extend import _frame, _lines
from undrawn import undraw

LOSSES = {"a": _lines((3.0, 4.0), YaRN=(3.1, 3.2)), "b": _lines((2.0, 2.5), PI=(2.6, 2.7))}


def _folder(place: Path, text: str, model: str = "model") -> Path:
    """What `extend` leaves: a configuration and a frame."""
    place.mkdir()
    config = {
        "model": f"/models/{model}.gguf",
        "text": [f"/texts/{text}.txt"],
        "windows": 3,
        "train_length": 8,
    }
    stored = {"format": FORMAT, "kind": extend.KIND, "config": config}
    (place / "config.json").write_text(json.dumps(stored))
    measured = _frame(LOSSES[text]).with_columns(pl.lit(model).alias("row"))
    measurements.write(place / measurements.FILE, measured)
    return place


def test_every_row_is_that_of_its_own_page(tmp_path: Path) -> None:
    places = [_folder(tmp_path / "1", "a"), _folder(tmp_path / "2", "b")]
    places.append(_folder(tmp_path / "3", "a", "other"))
    made = context(extend.GALLERY.page, extend.combine(places)).tables[0]
    keys = [column.key for column in made.columns]
    rows = {line[0].text: dict(zip(keys, line, strict=True)) for line in made.cells}
    alone = {}
    for place, text, model in zip(places, "aba", ("model", "model", "other"), strict=True):
        tables = {
            t.key: t
            for t in context(extend.STUDY.page, measurements.read(place / measurements.FILE)).tables
        }
        for key, column, here in (
            ("table", "loss_8", "loss_1"),
            ("table", "loss_16", "loss_2"),
            ("change", "change_16", "change"),
            ("cost", "change", "cost"),
            ("table", "parameters", "parameters"),
        ):
            names = [each.key for each in tables[key].columns]
            for line in tables[key].cells:
                cell = dict(zip(names, line, strict=True))[column]
                label = f"{model}, {text}.txt: {line[0].text}"
                alone[label, here] = cell.text
    assert {(label, key): rows[label][key].text for label, key in alone} == alone
    assert len(rows) == 6
    assert rows["model, a.txt: YaRN"]["change"].text.startswith("+0.200")
    assert made.notes[0].startswith("model on a.txt (3 windows, L = 8): YaRN (YaRN(factor=4))")
    assert made.notes[1].startswith(
        "model on b.txt (3 windows, L = 8): No method is clearly better"
    )


def test_the_command_and_its_frame(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    undraw(monkeypatch)
    places = [str(_folder(tmp_path / text, text)) for text in "ab"]
    pages = []
    for arguments in ([*places, "--out", str(tmp_path / "all")], [str(tmp_path / "all")]):
        with pytest.raises(SystemExit) as ended:
            main(["report", *arguments])
        assert ended.value.code == 0, capsys.readouterr()
        pages.append((tmp_path / "all" / "report.html").read_text())
    assert pages[0] == pages[1]
    assert "model, b.txt: PI" in (tmp_path / "all" / "table.md").read_text()
    stored = json.loads((tmp_path / "all" / "config.json").read_text())
    assert stored["kind"] == extend.GALLERY.name
    assert stored["config"]["model, a.txt"] == {"windows": 3, "train_length": 8}
    before = Path(places[0], measurements.FILE).read_bytes()
    with pytest.raises(SystemExit) as ended:
        main(["report", *places])
    assert ended.value.code == 2
    assert "another --out" in capsys.readouterr().err
    assert Path(places[0], measurements.FILE).read_bytes() == before
    (tmp_path / "all" / "config.json").write_text('{"format": 1, "kind": "keynorm", "config": {}}')
    with pytest.raises(SystemExit) as ended:
        main(["report", *places, "--out", str(tmp_path / "all")])
    assert ended.value.code == 2
    assert "belongs to keynorm: give another --out" in capsys.readouterr().err


def test_one_text_twice_is_refused(tmp_path: Path) -> None:
    twice = [_folder(tmp_path / "1", "a"), _folder(tmp_path / "2", "a")]
    with pytest.raises(InputError, match=r"1 and .*2 both hold model on a\.txt"):
        extend.combine(twice)
    with pytest.raises(InputError, match=r"1 and .*1 both hold model on a\.txt"):
        extend.combine(twice[:1] * 2)

"""Pages of published folders, changed, half trained or put together: a page or one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import polars as pl
import pytest

from normattn.errors import InputError
from normattn.lab.stats import measurements
from normattn.lab.studies import COMMAND_STUDIES, find
from normattn.lab.sweep.collect import refuse_changed_text
from normattn.lab.sweep.run import canonical_json
from studies.conftest import run
from thorough import few

pytestmark = pytest.mark.usefixtures("runs_here")
RESULTS = Path(__file__).parents[2] / "results"
TEXT, NORMS = RESULTS / "retrofit-base", RESULTS / "rmsnorm-laptop"


def _copy(place: Path, folder: Path) -> pl.DataFrame:
    folder.mkdir()
    for name in ("config.json", measurements.FILE):
        shutil.copy(place / name, folder)
    return measurements.read(folder / measurements.FILE)


def assert_reported_or_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run("report", folder, "--out", folder / "again")
    said = capsys.readouterr().err
    assert "Traceback" not in said
    if code == 0:
        assert (folder / "again" / "table.json").is_file()
    else:
        assert code == 2
        assert said.strip().splitlines()[-1].startswith("normattn: ")


CHANGES = {
    **{
        name: pl.lit("§ another").alias(name) for name in ("row", "protocol", "statistic", "method")
    },
    "training length": pl.lit(0, dtype=pl.Int64).alias("train_length"),
    "nothing counted": pl.lit(0.0).alias("of"),
    "tiny": pl.lit(5e-324).alias("sum"),
}


@pytest.mark.parametrize(
    "change", few(CHANGES, ("row", "training length", "nothing counted").__contains__)
)
def test_changed_measurements(
    change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "changed"
    measured = _copy(TEXT, folder).with_columns(CHANGES[change])
    names = [column for column in measured.columns if column not in ("sum", "of")]
    measurements.write(
        folder / measurements.FILE, measured.unique(names, keep="first", maintain_order=True)
    )
    assert_reported_or_refused(folder, capsys)


@pytest.mark.parametrize(
    ("setting", "value"), [("changed", [1, 2]), ("asked", {"a": 1}), ("preset", [])]
)
def test_changed_settings(
    setting: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "changed"
    _copy(TEXT, folder)
    stored = json.loads((folder / "config.json").read_text())
    stored["config"][setting] = value
    (folder / "config.json").write_text(json.dumps(stored))
    assert_reported_or_refused(folder, capsys)


def test_a_bug_of_the_library_is_no_fault_of_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object, **named: object) -> None:
        raise NameError("name 'nobody' is not defined")

    monkeypatch.setattr("normattn.lab.studies.base.context", broken)
    with pytest.raises(NameError, match="nobody"):
        run("report", TEXT)


def _trained() -> list[Path]:
    folders = sorted(file.parent for file in RESULTS.glob("*/" + measurements.FILE))
    kinds = {f: json.loads((f / "config.json").read_text())["kind"] for f in folders}
    return [folder for folder in folders if kinds[folder] not in COMMAND_STUDIES]


@pytest.mark.parametrize(
    "folder", few(_trained(), (TEXT, NORMS).__contains__), ids=lambda folder: folder.name
)
def test_what_is_training_still_stands_in_no_way(folder: Path, tmp_path: Path) -> None:
    """Loss curves are there before anything is measured, of one row or of all."""
    measured = measurements.read(folder / measurements.FILE)
    config = json.loads((folder / "config.json").read_text())["config"]
    training = pl.col("protocol") == "training"
    second = training | (pl.col("row") == measured["row"].unique(maintain_order=True)[-1])
    for name, kept in (("one", second), ("all", training)):
        said = ""
        try:
            find(measured["study"][0]).report(measured.filter(kept), tmp_path / name, config)
        except InputError as error:
            said = str(error)
        assert "nothing to report" in said or (tmp_path / name / "table.md").read_text()


def test_a_page_takes_its_settings_and_sources_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, out = tmp_path / "place", tmp_path / "out"
    _copy(NORMS, place)
    (place / "corpus.json").write_text('{"fingerprints": ["7"], "sources": {"text": "1.0"}}')
    assert run("report", place, "--out", out) == 0
    for name in ("config.json", "corpus.json"):
        assert json.loads((out / name).read_bytes()) == json.loads((place / name).read_bytes())
    assert (out / measurements.FILE).read_bytes() == (NORMS / measurements.FILE).read_bytes()
    stored = json.loads((out / "config.json").read_bytes())
    stored["config"]["preset"] = "mine"
    (out / "config.json").write_text(json.dumps(stored))
    assert run("report", place, "--out", out) == 2
    (place / "corpus.json").write_text('{"fingerprints": [7]}')
    assert run("report", place, "--out", tmp_path / "again") == 2
    said = capsys.readouterr().err
    assert "other settings" in said
    assert "corpus.json" in said


def test_results_of_several_folders_have_no_page_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("report", NORMS, RESULTS / "extend-smollm2", "--out", tmp_path / "out") == 2
    assert "rmsnorm-laptop" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_trainings_on_a_text_that_changed_stand_on_no_page_together(tmp_path: Path) -> None:
    def trained(name: str, fingerprint: str, corpus: str = "texts") -> Path:
        place = tmp_path / name
        place.mkdir()
        config = {"config": {"data": {"corpus": corpus}, "seed": len(name)}}
        (place / "config.json").write_text(json.dumps(config))
        (place / "corpus.json").write_text(json.dumps({"fingerprint": fingerprint, "sources": {}}))
        return place

    runs = [trained("a", "7"), trained("bb", "7"), trained("other", "8", corpus="english")]
    now = {canonical_json({"corpus": "texts"}): "7"}
    refuse_changed_text([*runs, tmp_path / "not begun"], now)
    with pytest.raises(InputError, match=r"the corpus now and what .*/other was trained on"):
        refuse_changed_text(runs, {canonical_json({"corpus": "english"}): "9"})
    with pytest.raises(InputError, match=r"/a and what .*/late was trained on differ"):
        refuse_changed_text([*runs, trained("late", "9")])

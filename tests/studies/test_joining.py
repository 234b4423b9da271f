"""Folders of one study on one page: cells apart give the page of all; what does not fit is named.

The frames are those of a published folder, divided.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from normattn.cli.app import main
from normattn.cli.options import Report
from normattn.cli.report import report_folders
from normattn.errors import InputError
from normattn.lab.stats import measurements
from normattn.lab.sweep.collect import refuse_changed_text
from normattn.lab.sweep.run import canonical_json
from undrawn import undraw

RESULTS = Path(__file__).parents[2] / "results"
WHOLE = RESULTS / "rmsnorm-laptop"
Part = Callable[[Path, pl.Expr], Path]


@pytest.fixture(scope="module")
def part() -> Part:
    """Makes a folder of those rows of the published frame that an expression keeps."""
    measured = measurements.read(WHOLE / measurements.FILE)

    def make(folder: Path, kept: pl.Expr) -> Path:
        folder.mkdir()
        shutil.copy(WHOLE / "config.json", folder)
        measurements.write(folder / measurements.FILE, measured.filter(kept))
        return folder

    return make


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    undraw(monkeypatch)


def _change(folder: Path, name: str, value: object) -> None:
    stored = json.loads((folder / "config.json").read_text())
    stored["config"][name] = value
    (folder / "config.json").write_text(json.dumps(stored))


def _refused(places: list[Path], out: Path, why: str) -> None:
    before = sorted(out.rglob("*"))
    with pytest.raises(InputError, match=why):
        report_folders(Report(runs=[*map(str, places)], out=out))
    assert sorted(out.rglob("*")) == before


def test_seeds_apart_give_the_page_of_all(
    part: Part, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [part(tmp_path / "late", pl.col("seed") > 0), part(tmp_path / "0", pl.col("seed") < 1)]
    _change(places[1], "changed", {"training.checkpoint_seconds": 5})
    out = tmp_path / "all"
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, places), "--out", str(out)])
    assert ended.value.code == 0, capsys.readouterr()
    for name in ("table.json", measurements.FILE, "config.json"):
        assert (out / name).read_bytes() == (WHOLE / name).read_bytes(), name
    before = (out / "table.md").read_bytes()
    report_folders(Report(runs=[*map(str, [out])], out=out))
    assert (out / "table.md").read_bytes() == before


def _trained_on(folder: Path, **sources: str) -> None:
    (folder / "corpus.json").write_text(json.dumps({"fingerprints": ["7"], "sources": sources}))


def test_a_page_alone_takes_its_settings_and_sources_along(part: Part, tmp_path: Path) -> None:
    """So that what is published can be joined with other cells later."""
    place = part(tmp_path / "0", pl.col("seed") < 1)
    _trained_on(place, text="1.0")
    out = tmp_path / "out"
    report_folders(Report(runs=[*map(str, [place])], out=out))
    for name in ("config.json", "corpus.json"):
        assert json.loads((out / name).read_bytes()) == json.loads((place / name).read_bytes())
    _change(out, "seed", 8)
    _refused([place], out, "holds other settings than .*: give another --out")


def test_one_text_under_two_addresses_is_one_corpus(part: Part, tmp_path: Path) -> None:
    places = [part(tmp_path / "a", pl.col("seed") > 0), part(tmp_path / "b", pl.col("seed") < 1)]
    for place, address in zip(
        places, ("python-packages", "python-packages?versions=x"), strict=True
    ):
        stored = json.loads((place / "config.json").read_text())
        stored["config"].setdefault("training", {}).setdefault("data", {})["corpus"] = address
        (place / "config.json").write_text(json.dumps(stored))
    _refused(places, tmp_path / "out", "training.data.corpus is 'python-packages' in the first")
    for place in places:
        _trained_on(place, text="1.0")
    report_folders(Report(runs=[*map(str, places)], out=tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "corpus.json").read_text()) == {
        "fingerprints": ["7"],
        "sources": {"text": "1.0"},
    }
    _trained_on(places[0], text="1.1")
    _refused(places, tmp_path / "again", "training.data.corpus is 'python-packages' in the first")
    (places[0] / "corpus.json").write_text('{"fingerprints": [7]}')
    _refused(places, tmp_path / "again", "corpus.json is damaged: expected fingerprints and")


def test_trainings_of_one_row_and_seed_are_told_by_what_they_vary_in(tmp_path: Path) -> None:
    """A learning-rate sweep trains KNA with seed 0 six times: rates may be joined."""
    whole = RESULTS / "qknorm-laptop"
    measured = measurements.read(whole / measurements.FILE).filter(row="KNA", seed=0)
    places = []
    for name, kept in (("low", pl.col("factor.rate") < 4), ("high", pl.col("factor.rate") >= 4)):
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(whole / "config.json", folder)
        measurements.write(folder / measurements.FILE, measured.filter(kept))
        places.append(folder)
    report_folders(Report(runs=[*map(str, places)], out=tmp_path / "out"))
    rows = measurements.read(tmp_path / "out" / measurements.FILE)
    assert rows["factor.rate"].n_unique() == measured["factor.rate"].n_unique() > 3
    shutil.copytree(places[1], tmp_path / "again")
    _refused([*places, tmp_path / "again"], tmp_path / "no", r"KNA seed 0 \(images, 0.016, 4.0\)")


def test_the_page_of_all_says_every_command(part: Part, tmp_path: Path) -> None:
    places = [part(tmp_path / "a", pl.col("seed") > 0), part(tmp_path / "b", pl.col("seed") < 1)]
    _change(places[0], "asked", [{"seeds": "1,2"}])
    _change(places[1], "asked", [])
    out = tmp_path / "all"
    for _ in range(2):
        report_folders(Report(runs=[*map(str, places)], out=out))
    command = "normattn reproduce rmsnorm --preset laptop"
    assert f"`{command} --seeds 1,2 && {command}`" in (out / "table.md").read_text()


def test_a_cell_in_two_folders_is_refused(part: Part, tmp_path: Path) -> None:
    places = [part(tmp_path / "a", pl.col("seed") > 0), part(tmp_path / "b", pl.col("seed") < 2)]
    _refused(places, tmp_path / "out", "a and .*b both hold LayerNorm.* seed 1")


def test_other_settings_are_named(part: Part, tmp_path: Path) -> None:
    places = [part(tmp_path / "a", pl.col("seed") > 0), part(tmp_path / "b", pl.col("seed") < 1)]
    _change(places[1], "preset", "mine")
    why = "b .*: preset is 'laptop' in the first and 'mine' in the second"
    _refused(places, tmp_path / "out", why)


def test_other_documents_are_refused(part: Part, tmp_path: Path) -> None:
    places = [part(tmp_path / "a", pl.col("seed") > 0), part(tmp_path / "b", pl.col("seed") < 1)]
    measured = measurements.read(places[1] / measurements.FILE)
    elsewhere = pl.when(pl.col("data") == "").then(pl.lit("")).otherwise(pl.lit("elsewhere"))
    measurements.write(
        places[1] / measurements.FILE, measured.with_columns(elsewhere.alias("data"))
    )
    _refused(places, tmp_path / "out", "b were measured on different documents")


def test_the_page_of_all_needs_a_place_of_its_own(part: Part, tmp_path: Path) -> None:
    places = [part(tmp_path / "a", pl.col("seed") > 0), part(tmp_path / "b", pl.col("seed") < 1)]
    _refused(places, places[0], "a holds some of the cells of rmsnorm: give .* its own --out")
    other = part(tmp_path / "other", pl.col("seed") > 0)
    _change(other, "preset", "mine")
    _refused(places, other, "config.json holds other settings than .*a: give another --out")


def test_folders_of_two_studies_are_refused(part: Part, tmp_path: Path) -> None:
    places = [part(tmp_path / "a", pl.col("seed") > 0), RESULTS / "extend-smollm2"]
    _refused(
        places,
        tmp_path / "out",
        "a holds the study rmsnorm and .*extend-smollm2 the study extend, which have no table",
    )


def test_trainings_on_a_text_that_changed_stand_on_no_page_together(tmp_path: Path) -> None:
    def trained(name: str, fingerprint: str, corpus: str = "texts") -> Path:
        run = tmp_path / name
        run.mkdir()
        config = {"config": {"data": {"corpus": corpus}, "seed": len(name)}}
        (run / "config.json").write_text(json.dumps(config))
        (run / "corpus.json").write_text(json.dumps({"fingerprint": fingerprint, "sources": {}}))
        return run

    runs = [trained("a", "7"), trained("bb", "7"), trained("other", "8", corpus="english")]
    now = {canonical_json({"corpus": "texts"}): "7"}
    refuse_changed_text([*runs, tmp_path / "not begun"], now)
    with pytest.raises(InputError, match=r"the corpus as it is and what .*/other was trained on"):
        refuse_changed_text(runs, {canonical_json({"corpus": "english"}): "9"})
    with pytest.raises(InputError, match=r"/a and what .*/late was trained on differ"):
        refuse_changed_text([*runs, trained("late", "9")])

"""Reports of folders: what a page takes along, and what has no page together."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from normattn.cli.options import Report
from normattn.cli.report import report_folders
from normattn.errors import InputError
from normattn.lab.stats import measurements
from normattn.lab.sweep.collect import refuse_changed_text
from normattn.lab.sweep.run import canonical_json
from undrawn import undraw

RESULTS = Path(__file__).parents[2] / "results"
PUBLISHED = RESULTS / "rmsnorm-laptop"


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    undraw(monkeypatch)


def report(out: Path, *places: Path) -> None:
    report_folders(Report(runs=[*map(str, places)], out=out))


def test_a_page_takes_its_settings_and_sources_along(tmp_path: Path) -> None:
    place, out = tmp_path / "place", tmp_path / "out"
    place.mkdir()
    for name in ("config.json", measurements.FILE):
        shutil.copy(PUBLISHED / name, place)
    (place / "corpus.json").write_text('{"fingerprints": ["7"], "sources": {"text": "1.0"}}')
    report(out, place)
    for name in ("config.json", "corpus.json"):
        assert json.loads((out / name).read_bytes()) == json.loads((place / name).read_bytes())
    assert (out / measurements.FILE).read_bytes() == (PUBLISHED / measurements.FILE).read_bytes()
    stored = json.loads((out / "config.json").read_bytes())
    stored["config"]["preset"] = "mine"
    (out / "config.json").write_text(json.dumps(stored))
    with pytest.raises(InputError, match=r"holds other settings than .*: give another"):
        report(out, place)
    (place / "corpus.json").write_text('{"fingerprints": [7]}')
    with pytest.raises(InputError, match=r"corpus\.json is damaged"):
        report(tmp_path / "again", place)


def test_results_of_several_folders_have_no_page_together(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rmsnorm-laptop holds results without runs"):
        report(tmp_path / "out", PUBLISHED, RESULTS / "extend-smollm2")
    assert not (tmp_path / "out").exists()


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
    with pytest.raises(InputError, match=r"the corpus now and what .*/other was trained on"):
        refuse_changed_text(runs, {canonical_json({"corpus": "english"}): "9"})
    with pytest.raises(InputError, match=r"/a and what .*/late was trained on differ"):
        refuse_changed_text([*runs, trained("late", "9")])

"""Published folders: every number is computed again from the folder's frame."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from normattn.measure import frame
from normattn.report.context import PageContext
from normattn.report.markdown import page_json, page_markdown
from normattn.report.page import context
from normattn.studies import find

RESULTS = Path(__file__).parents[2] / "results"
FOLDERS = sorted(path.parent for path in RESULTS.glob(f"*/{frame.FILE}"))


def test_there_is_a_published_frame() -> None:
    assert FOLDERS


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: str(folder.name))
def folder(request: pytest.FixtureRequest) -> Path:
    found = request.param
    assert isinstance(found, Path)
    return found


@pytest.fixture(scope="module")
def made(folder: Path) -> PageContext:
    measured = frame.read(folder / frame.FILE)
    study = find(measured["study"][0])
    config = json.loads((folder / "config.json").read_text())["config"]
    return context(study.page, measured, command=study.command(config["preset"]))


def test_every_number_is_the_published_one(folder: Path, made: PageContext) -> None:
    published = json.loads((folder / "table.json").read_text())
    again = json.loads(page_json(made))
    assert again.keys() == published.keys()
    assert again["claims"] == published["claims"]
    for key, rows in published["tables"].items():
        for row, other in zip(rows, again["tables"][key], strict=True):
            for name, value in row.items():
                if isinstance(value, dict):
                    assert other[name] == pytest.approx(value, rel=1e-9, abs=1e-9), (row, name)
                else:
                    assert other[name] == value, (row, name)


def test_the_page_is_the_published_one(folder: Path, made: PageContext) -> None:
    assert page_markdown(made) == (folder / "table.md").read_text()

"""Published folders: every number is computed again from the folder's frame.

The smallest folder of each study, and all of them with `--thorough`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from normattn.lab.report.output import page_json, page_markdown
from normattn.lab.report.page import PageContext, context
from normattn.lab.stats import measurements
from normattn.lab.studies import find
from thorough import few, smallest_of_each_study

RESULTS = Path(__file__).parents[2] / "results"
FOLDERS = sorted(path.parent for path in RESULTS.glob(f"*/{measurements.FILE}"))


def test_there_is_a_published_frame() -> None:
    assert FOLDERS


@pytest.fixture(
    scope="module",
    params=few(FOLDERS, smallest_of_each_study(FOLDERS).__contains__),
    ids=lambda folder: str(folder.name),
)
def folder(request: pytest.FixtureRequest) -> Path:
    found = request.param
    assert isinstance(found, Path)
    return found


@pytest.fixture(scope="module")
def made(folder: Path) -> PageContext:
    measured = measurements.read(folder / measurements.FILE)
    study = find(measured["study"][0])
    config = json.loads((folder / "config.json").read_text())["config"]
    return context(study.page, measured, command=study.command(config))


def test_every_number_is_the_published_one(folder: Path, made: PageContext) -> None:
    published = json.loads((folder / "table.json").read_text())
    assert_close(json.loads(page_json(made)), published)


def assert_close(again: Any, published: Any, where: str = "") -> None:
    """Equal, numbers to nine digits."""
    if isinstance(published, dict):
        assert again.keys() == published.keys(), where
        for name in published:
            assert_close(again[name], published[name], f"{where}.{name}")
    elif isinstance(published, list):
        assert len(again) == len(published), where
        for number, value in enumerate(published):
            assert_close(again[number], value, f"{where}[{number}]")
    elif isinstance(published, float):
        assert again == pytest.approx(published, rel=1e-9, abs=1e-9), where
    else:
        assert again == published, where


def test_the_page_shows_every_number_and_no_negative_zero(made: PageContext) -> None:
    text = page_markdown(made)
    shown = [
        cell.text.split(" ")[0]
        for table in made.tables
        for line in table.cells
        for place, cell in enumerate(line)
        if place not in table.hidden
    ]
    assert all(word in text for word in shown)
    assert not re.search(r"(?<![\w.])-0(\.0+)?(?![\w.])", text)

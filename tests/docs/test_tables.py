"""Tables of results in docs/ are what results/ holds."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "result_tables.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_the_published_tables(page: Path, made: dict[str, Any]) -> None:
    text = page.read_text("utf-8")
    assert made["remade"](text) == text, "run python scripts/result_tables.py"


def test_every_table_is_on_a_page(made: dict[str, Any]) -> None:
    shown = {name for page in PAGES for _, name, _ in made["MARKED"].findall(page.read_text())}
    assert shown == set(made["TABLES"])


def test_a_cell_is_the_published_number() -> None:
    path = ROOT / "results" / "keynorm-workstation-onehead" / "table.json"
    rows = json.loads(path.read_text("utf-8"))["tables"]["table"]
    value = next(row for row in rows if row["row"] == "KNA")["non_repeated"]["value"]
    lines = (ROOT / "docs" / "keynorm.md").read_text("utf-8").splitlines()
    assert any(line.startswith("| `KNA` |") and f" {value:.1f} " in line for line in lines)

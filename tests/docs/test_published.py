"""What results/ holds: its numbers come out again, and are those of the documentation.

Of folders the smallest of each study, and all of them with `--thorough`.
"""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from normattn.lab.report.output import page_json, page_markdown
from normattn.lab.report.page import PageContext, context
from normattn.lab.stats import measurements
from normattn.lab.studies import find
from normattn.lab.studies.keynorm import METHODS, VARIANTS
from normattn.score.spec import UNMODIFIED
from thorough import few, smallest_of_each_study

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
PAGES = sorted((ROOT / "docs").glob("*.md"))
FOLDERS = sorted(path.parent for path in RESULTS.glob(f"*/{measurements.FILE}"))
assert FOLDERS


@pytest.fixture(
    scope="module",
    params=few(FOLDERS, smallest_of_each_study(FOLDERS).__contains__),
    ids=lambda folder: str(folder.name),
)
def folder(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.fixture(scope="module")
def made(folder: Path) -> PageContext:
    measured = measurements.read(folder / measurements.FILE)
    study = find(measured["study"][0])
    config = json.loads((folder / "config.json").read_text())["config"]
    return context(study.page, measured, command=study.command(config))


def leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """What stands in an object of JSON, by its place."""
    if not isinstance(value, dict | list) or not value:
        yield where, value
    else:
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(each, f"{where}.{key}")


def test_every_number_is_the_published_one(folder: Path, made: PageContext) -> None:
    """To nine digits; everything else is equal."""
    published = dict(leaves(json.loads((folder / "table.json").read_text())))
    again = dict(leaves(json.loads(page_json(made))))
    assert again.keys() == published.keys()
    for where, value in published.items():
        close = pytest.approx(value, rel=1e-9, abs=1e-9) if isinstance(value, float) else value
        assert again[where] == close, where


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


# Tables in docs/.


@pytest.fixture(scope="module")
def tables() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "result_tables.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_the_published_tables(page: Path, tables: dict[str, Any]) -> None:
    text = page.read_text("utf-8")
    assert tables["remade"](text) == text, "run python scripts/result_tables.py"


def test_every_table_is_on_a_page(tables: dict[str, Any]) -> None:
    shown = {name for page in PAGES for _, name, _ in tables["MARKED"].findall(page.read_text())}
    assert shown == set(tables["TABLES"])


def rows(folder: str) -> dict[str, Any]:
    page = json.loads((RESULTS / folder / "table.json").read_text("utf-8"))
    return {row["row"]: row for row in page["tables"]["table"]}


def test_a_cell_is_the_published_number() -> None:
    value = rows("keynorm-base")["KNA"]["non_repeated"]["value"]
    lines = (ROOT / "docs" / "keynorm.md").read_text("utf-8").splitlines()
    assert any(line.startswith("| `KNA` |") and f" {value:.1f} " in line for line in lines)


# The README's first command.


def quick_name(variant: str, method: str) -> str:
    return variant if method == UNMODIFIED else f"{variant}-{method}"


def test_the_first_command_is_what_made_the_folder() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    command = readme.split("<!-- command 1: reproduce -->\n```bash\n")[1].split("\n```")[0]
    assert command.endswith(".venv/bin/normattn reproduce keynorm --preset quick")
    folder = RESULTS / "keynorm-quick"
    assert "normattn reproduce keynorm --preset quick`" in (folder / "table.md").read_text("utf-8")
    preset = resources.files("normattn.lab.studies") / "presets" / "quick.toml"
    written = tomllib.loads(preset.read_text("utf-8"))
    resolved = json.loads((folder / "config.json").read_text("utf-8"))["config"]
    for group in ("training", "evaluation"):
        assert dict(leaves(written[group])).items() <= dict(leaves(resolved[group])).items()
    assert {quick_name(v, m) for v in VARIANTS for m in METHODS} == set(rows("keynorm-quick"))


def test_docs_quick_has_the_table_of_the_first_command() -> None:
    """What each score has at L, and what a longer context changes: Baseline loses, others gain."""
    quick, lines = rows("keynorm-quick"), []
    for variant in VARIANTS:
        changes = [quick[quick_name(variant, m)]["change"]["value"] for m in METHODS]
        cells = [f"`{variant}`", f"{quick[variant]['train']['value']:.1f}"]
        cells += [f"{value:+.1f}".replace("-", "−") for value in changes]
        lines.append(f"| {' | '.join(cells)} |")
    assert "\n".join(lines) in (ROOT / "docs" / "quick.md").read_text("utf-8")
    assert quick["Baseline"]["change"]["high"] < 0
    for variant in ("KNA", "KNA-logn", "CosA", "CosA-logn"):
        assert quick[variant]["change"]["low"] > 0

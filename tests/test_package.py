"""What is released: stable names, version, the package's page, the workflow that publishes."""

from __future__ import annotations

import re
import runpy
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType
from typing import Any

import grimp
import pytest

import normattn
from normattn.cli.app import app

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "public-interface.md").read_text("utf-8")
ADDRESS = "https://github.com/OWNER/NAME"


def test_the_page_of_stable_names_is_the_interface() -> None:
    python = PAGE.split("## Python\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \|", python, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(normattn.__all__)
    for name in named:
        assert getattr(normattn, name).__doc__, name


def test_the_page_names_every_command() -> None:
    line = " ".join(PAGE.split()).split("The commands ")[1].split("with the options")[0]
    named = set(re.findall(r"`([\w-]+)`", line))
    known = {each.name for each in app.registered_commands if not each.hidden}
    known |= {each.name for each in app.registered_groups}
    assert named == known


def test_a_version_is_one_everywhere() -> None:
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {normattn.__version__}\n" in citation
    roadmap = (ROOT / "docs" / "roadmap.md").read_text("utf-8")
    assert f"{{Version {normattn.__version__}}}" in roadmap
    date = re.findall(r'^date-released: "(.*)"$', citation, re.MULTILINE)
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    heading = re.findall(rf"^## {re.escape(normattn.__version__)} - (.*)$", changes, re.MULTILINE)
    assert heading == date
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert project["tool"]["hatch"]["version"]["path"] == "src/normattn/__init__.py"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The metadata hook, on a stand-in for hatchling's base class."""
    module = ModuleType("hatchling.metadata.plugin.interface")
    module.__dict__["MetadataHookInterface"] = type("MetadataHookInterface", (), {"root": ROOT})
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv("NORMATTN_REPOSITORY", raising=False)
    return runpy.run_path(str(ROOT / "scripts" / "package_page.py"))["PackagePage"]


def shown(page: Any) -> tuple[str, dict[str, str]]:
    metadata: dict[str, Any] = {}
    page().update(metadata)
    assert metadata["readme"]["content-type"] == "text/markdown"
    return metadata["readme"]["text"], metadata["urls"]


def targets(text: str) -> list[str]:
    return re.findall(r"\]\(([^)]*)\)", text)


def test_without_an_address_the_page_points_nowhere(page: Any) -> None:
    text, urls = shown(page)
    assert urls == {}
    assert "![" not in text
    assert all(each.startswith("https://") for each in targets(text))
    assert "# normattn" in text


def test_with_an_address_every_target_is_a_file_of_this_version(
    page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NORMATTN_REPOSITORY", f"{ADDRESS}/")
    text, urls = shown(page)
    tag = f"v{normattn.__version__}"
    assert urls["Repository"] == ADDRESS
    assert urls["Changelog"] == f"{ADDRESS}/blob/{tag}/CHANGELOG.md"
    images = re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
    assert images
    for each in targets(text):
        if not each.startswith(ADDRESS):
            assert each.startswith("https://"), each
            continue
        view, file = each.removeprefix(f"{ADDRESS}/").split(f"/{tag}/")
        assert view == ("raw" if each in images else "blob")
        assert (ROOT / file.split("#")[0]).exists(), each


def test_the_workflow_uses_pinned_actions_and_no_token() -> None:
    flow = (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
    used = re.findall(r"uses: (\S+)", flow)
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", each) for each in used), used
    assert "secrets." not in flow
    assert flow.count("id-token: write") == 1
    assert "run: scripts/package dist" in flow


def test_no_two_files_import_each_other() -> None:
    """Imports for type checking and those inside of functions count too."""
    graph = grimp.build_graph("normattn", cache_dir=None)
    imports = {each: graph.find_modules_directly_imported_by(each) for each in graph.modules}
    assert len(imports) > 150
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))

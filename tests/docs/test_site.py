"""What the site makes of the registry and of studies; building it whole is a check of its own."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mkdocs.config import load_config
from mkdocs.structure.files import Files

from normattn.lab.studies import COMMAND_STUDIES, find, names

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "scripts" / "site_pages.py"


@pytest.fixture(scope="module")
def site() -> dict[str, Any]:
    return runpy.run_path(str(PAGES))


def test_a_part_page_tells_all_that_the_part_says(site: dict[str, Any]) -> None:
    page = site["_part_page"]("YaRN", site["parts"]()["YaRN"], "a caption")
    for said in (
        "θ'_m = t·θ_m/s + (1 − t)·θ_m",
        "[2309.00071](https://arxiv.org/abs/2309.00071)",
        "**Used by:** DeepSeek-V3",
        "dim(beta_fast)",
        "| `beta_fast` | `32.0` |",
        "[NoPE](NoPE.md): YaRN changes rotary positions",
        "| cpu float32 | fused |",
        "![a caption](figures/YaRN.png)",
    ):
        assert said in page, said


def test_a_study_page_tells_what_the_study_says(site: dict[str, Any]) -> None:
    """Of every study of the library, and of those that commands measure."""
    pages = dict(site["study_pages"]())
    assert set(pages) == {f"study/{name}.md" for name in (*names(), *COMMAND_STUDIES)}
    for name in (*names(), *COMMAND_STUDIES):
        page, study = pages[f"study/{name}.md"], find(name)
        assert page.startswith(f"# {name}\n\n{study.page.question}\n\n{study.help}\n")
        for table in study.page.tables:
            assert table.title in page or table.title[1:] in page
        lines = [f"normattn reproduce {name} {line}" for line, _ in study.examples]
        for line in lines if not study.made_by else [study.made_by]:
            assert line in page
        for target in re.findall(r"\]\((\.\./[^)]+)\)", page):
            assert (ROOT / "docs" / target).resolve().exists(), target


def test_the_hook_makes_every_page_that_it_adds_to_the_navigation(
    site: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What mkdocs calls, on a configuration of mkdocs: pages of parts are made without figures."""
    config = load_config(str(ROOT / "mkdocs.yml"))
    known = site["parts"]()
    drawn = [("parts/index.md", ""), *((f"parts/{name}.md", "") for name in known)]
    monkeypatch.setitem(site["on_files"].__globals__, "part_pages", lambda: iter(drawn))
    monkeypatch.setattr(config.plugins, "_current_plugin", "site_pages", raising=False)
    by_hand = set(_pages(config.nav or []))
    site["on_config"](config)
    files = site["on_files"](Files([]), config)
    made = {file.src_uri for file in files}
    kept = {path.name for path in (ROOT / "docs").glob("*.md")}
    linked = set(_pages(config.nav or []))
    assert linked <= made | kept
    added = linked - by_hand
    assert {f"study/{name}.md" for name in (*names(), *COMMAND_STUDIES)} <= added & made
    assert {f"parts/{name}.md" for name in known} <= added
    assert {"index.md", "cli.md", "CONTRIBUTING.md", "results/README.md"} <= made
    assert "results/bridge/figures/factors.png" in made
    commands = next(file.content_string for file in files if file.src_uri == "cli.md")
    assert commands.count("\n## normattn ") == len(site["COMMANDS"])
    for option in ("--emit", "--against", "--multiples", "--seeds"):
        assert option in commands


def _pages(entry: Any) -> Iterator[str]:
    """Every page of a navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for each in entry.values() if isinstance(entry, dict) else entry:
            yield from _pages(each)


def test_links_of_guides_are_bent_to_the_site(site: dict[str, Any]) -> None:
    text = "[a](../results/x.md) [b](../development/log.md)"

    def bent(place: str) -> str:
        page = SimpleNamespace(file=SimpleNamespace(src_uri=place))
        said: str = site["on_page_markdown"](text, page)
        return said

    assert bent("studies.md") == "[a](results/x.md) [b](development/log.md)"
    assert bent("study/window.md") == "[a](../results/x.md) [b](../development/log.md)"

"""The documentation and its site are true: Python runs, commands parse, links lead somewhere."""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mkdocs.config import load_config
from mkdocs.structure.files import Files

from normattn.cli.app import COMMANDS, main
from normattn.lab.studies import COMMAND_STUDIES, find, names
from normattn.score.parts import Slot
from normattn.score.parts import base as registry

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

FILE = re.compile(r"^<!-- file: (\S+) -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [code for kind, code in FENCE.findall(page.read_text("utf-8")) if kind == language]


def commands() -> Iterator[tuple[str, str]]:
    """Every `normattn …` line of a shell block, and every one in backquotes that has options."""
    for page in PAGES:
        for code in blocks(page, "bash"):
            for line in code.splitlines():
                for part in line.split("&&"):
                    words = part.split("#")[0].strip()
                    if words.startswith(("normattn ", ".venv/bin/normattn ")):
                        yield page.name, words
        for words in re.findall(r"`(normattn [^`…]+)`", FENCE.sub("", page.read_text("utf-8"))):
            if " --" in words:
                yield page.name, words


@pytest.fixture
def own_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.parts()
    monkeypatch.setattr(registry, "_PARTS", dict(registry._PARTS))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_runs(
    page: Path, own_parts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No block raises; what a page says of a result stands in the block as an assertion."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": __name__}
    for number, code in enumerate(blocks(page, "python")):
        exec(compile(code, f"{page.name}, block {number}", "exec", dont_inherit=True), names)


def test_there_is_something_to_test() -> None:
    assert len(list(commands())) >= 8
    assert sum(len(blocks(page, "python")) for page in PAGES) >= 6


@pytest.mark.parametrize(("page", "line"), list(commands()))
def test_commands_are_understood(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsing, defaults and dispatch are real; the work itself is left out.

    The files that the pages say one has are there.
    """
    done: list[str] = []
    monkeypatch.chdir(tmp_path)
    for path in PAGES:
        for name, code in FILE.findall(path.read_text("utf-8")):
            (tmp_path / name).write_text(code)

    def work(name: str) -> Any:
        def noted(*args: Any, **kwargs: Any) -> int | None:
            done.append(name)
            # Those whose exit status says what was found.
            return 0 if name.startswith("cli.score.") else None

        return noted

    commands = (f"cli.{target.replace(':', '.')}" for _, target in COMMANDS.values())
    for place in (*commands, "lab.sweep.runner.reproduce"):
        monkeypatch.setattr(f"normattn.{place}", work(place))
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(line)[1:])
    assert ended.value.code == 0
    assert done or line == "normattn list"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), target


def test_the_architecture_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    library = ROOT / "src" / "normattn"
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", page)
    assert len(named) > 15
    for name in named:
        assert (library / name).exists() or (library / "lab" / name).exists(), name


def test_the_architecture_names_functions_that_exist() -> None:
    """Each row of its two tables: a file, and functions or methods of it."""
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    steps = re.findall(r"^\| `([\w/]+)\.py` \| (`.+?) \|", page, re.MULTILINE)
    assert len(steps) > 15
    for file, functions in steps:
        inside = "" if (ROOT / "src" / "normattn" / f"{file}.py").exists() else "lab."
        module = importlib.import_module(f"normattn.{inside}{file.replace('/', '.')}")
        for name in re.findall(r"`([\w.]+)`", functions):
            assert callable(attrgetter(name)(module)) or name.isupper(), (file, name)


def test_the_table_of_types_is_that_of_the_registry() -> None:
    """Made again by the site's own function: `python scripts/site_pages.py` writes it."""
    made = runpy.run_path(str(ROOT / "scripts" / "site_pages.py"))
    page = (ROOT / "docs" / "scores.md").read_text("utf-8")
    assert page == made["with_slot_table"](page), "run python scripts/site_pages.py"
    rows = re.findall(r"^\| ([\w ]+) \| .* \| (`.*`) \|$", page, re.MULTILINE)
    assert [slot for slot, _ in rows] == list(Slot)
    shown = {name for _, names in rows for name in re.findall(r"`([^`]+)`", names)}
    assert shown == set(registry.parts())
    assert f"each of {len(Slot)} types" in page


def test_ci_runs_the_second_command_of_the_readme(tmp_path: Path) -> None:
    """The runner takes it verbatim: in a copy, another command in its place is what runs."""
    readme = (ROOT / "README.md").read_text("utf-8")
    stands = readme.split("<!-- command 2: test -->\n```bash\n")[1].split("\n```")[0]
    assert stands.endswith("&& scripts/check")
    (tmp_path / ".ci").mkdir()
    runner = tmp_path / ".ci" / "run"
    runner.write_text((ROOT / ".ci" / "run").read_text())
    (tmp_path / "README.md").write_text(readme.replace(stands, "echo it ran && false"))
    said = subprocess.run(["bash", str(runner)], capture_output=True, text=True)
    assert said.stdout.splitlines() == ["echo it ran && false", "it ran"]
    assert said.returncode == 1


# The site; building it whole is a check of its own.
SITE_PAGES = ROOT / "scripts" / "site_pages.py"


@pytest.fixture(scope="module")
def site() -> dict[str, Any]:
    return runpy.run_path(str(SITE_PAGES))


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

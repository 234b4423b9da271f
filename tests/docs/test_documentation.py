"""The documentation is true: its Python runs, its commands parse, its links lead somewhere."""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from normattn.cli.app import COMMANDS, main
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
    """Parts that the documentation registers are forgotten again."""
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
    for file, names in steps:
        inside = "" if (ROOT / "src" / "normattn" / f"{file}.py").exists() else "lab."
        module = importlib.import_module(f"normattn.{inside}{file.replace('/', '.')}")
        for name in re.findall(r"`([\w.]+)`", names):
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

"""The documentation, its site and the examples are true: they run, parse and lead somewhere."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from mkdocs.config import load_config

import apart
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


@pytest.fixture(autouse=True)
def own_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that an example registers are forgotten again."""
    registry.parts()
    monkeypatch.setattr(registry, "_PARTS", dict(registry._PARTS))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No block raises; what a page says of a result stands in the block as an assertion."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": __name__}
    for number, code in enumerate(blocks(page, "python")):
        exec(compile(code, f"{page.name}, block {number}", "exec", dont_inherit=True), names)


LINES = [*commands()]
assert len(LINES) >= 8
assert sum(len(blocks(page, "python")) for page in PAGES) >= 6


@pytest.mark.parametrize(("page", "line"), LINES)
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
        return lambda *args, **kwargs: done.append(name)

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


def test_the_architecture_names_files_and_functions_that_exist() -> None:
    """Each row of its two tables is a file, and functions or methods of it."""
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    library = ROOT / "src" / "normattn"
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", page)
    rows = re.findall(r"^\| `([\w/]+)\.py` \| (`.+?) \|", page, re.MULTILINE)
    assert min(len(named), len(rows)) > 15
    for name in named:
        assert (library / name).exists() or (library / "lab" / name).exists(), name
    for file, functions in rows:
        inside = "" if (library / f"{file}.py").exists() else "lab."
        module = importlib.import_module(f"normattn.{inside}{file.replace('/', '.')}")
        for name in re.findall(r"`([\w.]+)`", functions):
            assert callable(attrgetter(name)(module)) or name.isupper(), (file, name)


@pytest.fixture(scope="module")
def site() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "site_pages.py"))


def test_the_table_of_types_is_that_of_the_registry(site: dict[str, Any]) -> None:
    """Made again by the site's own function: `python scripts/site_pages.py` writes it."""
    page = (ROOT / "docs" / "scores.md").read_text("utf-8")
    assert page == site["with_slot_table"](page), "run python scripts/site_pages.py"
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


def test_the_site_has_every_study_part_and_command(site: dict[str, Any]) -> None:
    """That each page of its navigation is made and each link leads somewhere: mkdocs --strict."""
    pages, known = dict(site["study_pages"]()), (*names(), *COMMAND_STUDIES)
    navigation = str(site["on_config"](load_config(str(ROOT / "mkdocs.yml"))).nav)
    made = {*(f"study/{name}.md" for name in known), *(f"parts/{n}.md" for n in registry.parts())}
    assert all(f"'{page}'" in navigation for page in made)
    for name in known:
        page, study = pages.pop(f"study/{name}.md"), find(name)
        assert page.startswith(f"# {name}\n\n{study.page.question}\n\n{study.help}\n")
        for table in study.page.tables:
            assert table.title in page or table.title[1:] in page
        lines = [f"normattn reproduce {name} {line}" for line, _ in study.examples]
        for line in lines if not study.made_by else [study.made_by]:
            assert line in page
    assert not pages
    _, commands = site["command_page"]()
    assert commands.count("\n## normattn ") == len(site["COMMANDS"])
    for option in ("--emit", "--against", "--multiples", "--seeds"):
        assert option in commands


# The examples.
EXAMPLES = ROOT / "examples"
SCRIPTS = {
    "exploding_logits": "QKRMSNorm",
    "key_shards": "",
    "one_page": "equal to 1e-12",
    "own_score": "kernel:",
    "read_further": "with ReRoPE",
    "rescue_llama": "extended with YaRN",
}
"""The scripts, and what each prints at its end. Each asserts what it shows."""


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_a_script_runs(name: str) -> None:
    path = EXAMPLES / f"{name}.py"
    ended = apart.run(f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')")
    assert ended.code == 0, ended.err
    assert SCRIPTS[name] in ended.out


def test_the_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads((EXAMPLES / "scores.ipynb").read_text("utf-8"))["cells"]
    names: dict[str, Any] = {"__name__": "__main__"}
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for number, source in enumerate(code):
        exec(compile(source, f"scores.ipynb, code cell {number}", "exec"), names)
    assert len(code) >= 4
    assert "trained as CosA-logn and extended with YaRN" in capsys.readouterr().out
    assert all(not cell.get("outputs") for cell in cells)

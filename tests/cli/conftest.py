"""A command-line run inside the test's own process, and one tiny trained run to use it on."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from studies import conftest as studies
from undrawn import undraw

TINY = (
    studies.TINY.replace("steps = 400", "steps = 4")
    .replace("checkpoint_seconds = 0.1\nthreads = 1", "checkpoint_seconds = 1000")
    .replace("max_windows = 8", "max_windows = 4")
)


@dataclass(frozen=True)
class Said:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The one line on stderr of a command that was refused, without the program's name."""
        assert len(self.err.strip().splitlines()) == 1, self.err
        return self.last

    @property
    def last(self) -> str:
        """The last line on stderr of a command that was refused, before which libraries speak."""
        assert self.code == 2, self.err
        assert "Traceback" not in self.err
        last = self.err.strip().splitlines()[-1]
        assert last.startswith("normattn: ")
        return last.removeprefix("normattn: ")


@dataclass(frozen=True)
class Command:
    """Run `normattn ARGUMENTS…` and return what it said."""

    capfd: pytest.CaptureFixture[str]

    def __call__(self, *arguments: object) -> Said:
        self.capfd.readouterr()
        code = studies.run(*arguments)
        said = self.capfd.readouterr()
        return Said(code, said.out, said.err)

    def done(self, *arguments: object) -> Said:
        """It must succeed."""
        said = self(*arguments)
        assert said.code == 0, said.err
        return said


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(capfd)


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    undraw(monkeypatch)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return studies.write_texts(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def tiny(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A preset file for models that train in a moment."""
    path = tmp_path_factory.mktemp("preset") / "tiny.toml"
    path.write_text(TINY.format(corpus=corpus))
    return path


@pytest.fixture(scope="session")
def trained(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of KNA."""
    out = tmp_path_factory.mktemp("runs") / "kna"
    assert studies.run("train", "--preset", tiny, "--score", "KNA", "--out", out) == 0
    return out


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the finished run as its training left it."""
    ignored = shutil.ignore_patterns("evaluations", "inspection", "report")
    return Path(shutil.copytree(trained, tmp_path / "runs" / "kna", ignore=ignored))


@pytest.fixture(scope="session")
def listed() -> dict[str, dict[str, Any]]:
    """What `normattn list --json` says of each part."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert studies.run("list", "--json") == 0
    return {part["name"]: part for part in json.loads(said.getvalue())}

"""One tiny trained run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from studies import conftest as studies
from studies.conftest import Command as Command
from studies.conftest import command as command
from undrawn import undraw

TINY = (
    studies.TINY.replace("steps = 400", "steps = 4")
    .replace("checkpoint_seconds = 0.1\nthreads = 1", "checkpoint_seconds = 1000")
    .replace("max_windows = 8", "max_windows = 4")
)


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

"""A study small enough for tests, and one that is finished."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

import apart
from normattn.cli.app import main
from normattn.lab.sweep.launchers import Local
from studies import here
from undrawn import undraw

TINY = """
summary = "for tests"

[training]
steps = 400
batch_size = 4
checkpoint_seconds = 0.1
threads = 1

[training.model]
dim = 16
layers = 1
heads = 2
train_length = 8

[training.data]
corpus = "{corpus}"
vocab_size = 260
test_fraction = 0.3

[training.schedule]
warmup_steps = 1

[evaluation]
multiples = [1, 2, 4]
max_windows = 8
"""


def write_texts(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for n in range(12):
        words = " ".join(f"word{(n * 7 + i * i) % 50}" for i in range(200))
        (folder / f"text{n:02}.txt").write_text(words)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A preset file whose cells train in about a second."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.toml"
    path.write_text(TINY.format(corpus=write_texts(path.with_name("texts"))))
    return path


@pytest.fixture
def runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Local, "session", here.session)
    undraw(monkeypatch)


def run(*words: object) -> int:
    """The exit code of `normattn WORDS…`, in this process."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


FINISHED = (*("--variants", "KNA", "--methods", "unmodified,YaRN"), *("--set", "training.steps=2"))
"""What the study of `finished` was asked for."""


@pytest.fixture(scope="session")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished keynorm study of one run, for every test: copy it to change it."""
    out = tmp_path_factory.mktemp("finished") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Local, "session", here.session)
        undraw(patch)
        assert run("reproduce", "keynorm", "--preset", tiny, *FINISHED, "--out", out) == 0
    return out


COMMAND = """
import os
os.environ.update(OMP_NUM_THREADS="1", COLUMNS="200")
from studies import here
here.main(cells_here={cells_here})
"""


class Start(Protocol):
    def __call__(self, *arguments: object, cells_here: bool = False) -> apart.Program:
        """Begin."""


@pytest.fixture
def start() -> Iterator[Start]:
    """Start `normattn ARGUMENTS…` as a process of its own; it is gone when the test ends.

    With `cells_here` its cells are no processes of their own: see here.py.
    Charts are not drawn.
    """
    started: list[apart.Program] = []

    def begin(*arguments: object, cells_here: bool = False) -> apart.Program:
        started.append(apart.Program(COMMAND.format(cells_here=cells_here), *arguments))
        return started[-1]

    yield begin
    for process in started:
        process.clear()

"""A sweep small enough for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TESTS = str(Path(__file__).parents[1])
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


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A preset file whose cells train in about a second."""
    folder = tmp_path_factory.mktemp("tiny")
    texts = folder / "texts"
    texts.mkdir()
    for n in range(12):
        words = " ".join(f"word{(n * 7 + i * i) % 50}" for i in range(200))
        (texts / f"text{n:02}.txt").write_text(words)
    path = folder / "tiny.toml"
    path.write_text(TINY.format(corpus=texts))
    return path


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start `normattn ARGUMENTS…` as a process of its own; it is gone when the test ends.

    With `cells_here` its cells are no processes of their own: see here.py.
    """
    started: list[subprocess.Popen[str]] = []
    path = os.pathsep.join(filter(None, (TESTS, os.environ.get("PYTHONPATH"))))

    def begin(*arguments: object, cells_here: bool = False) -> subprocess.Popen[str]:
        program = "studies.here" if cells_here else "normattn"
        process = subprocess.Popen(
            [sys.executable, "-m", program, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": path},
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()

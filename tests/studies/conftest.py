"""A study small enough for tests, one that is finished, and cells without processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

import apart
from normattn import __main__
from normattn.cli.app import main
from normattn.lab.sweep import launchers
from normattn.lab.sweep.launchers import Job, Local, Needs, Task
from undrawn import undraw

TINY = """
summary = "for tests"
[training]
steps = 400
batch_size = 4
checkpoint_seconds = 0.1
threads = 1
model = {{ dim = 16, layers = 1, heads = 2, train_length = 8 }}
data = {{ corpus = "{corpus}", vocab_size = 260, test_fraction = 0.3 }}
schedule = {{ warmup_steps = 1 }}
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


class Ended(Task):
    """A job that is run here, to its end, before it counts as started: Python and torch are there.

    What real processes do is tested by the kills and failures of test_sweep.py, test_launchers.py.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        assert job.arguments[:2] == ("-m", "normattn")
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("w") as log, redirect_stdout(log), redirect_stderr(log):
            self.code = run(*job.arguments[2:])

    def done(self) -> bool:
        return True

    def result(self) -> tuple[int, str]:
        said = "" if self.code == launchers.FINISHED else self.job.log.read_text().splitlines()[-1]
        return self.code, said.removeprefix("normattn: ")

    def stop(self) -> None:
        pass

    kill = stop


def cells_here(self: Local, jobs: Sequence[Job], needs: Needs) -> Any:
    return nullcontext(lambda jobs: [*map(Ended, jobs)])


def run_here(in_process: bool) -> None:
    """`normattn WORDS…`, without drawing, and with its cells here where it is said so."""
    with pytest.MonkeyPatch.context() as patch:
        undraw(patch)
        if in_process:
            patch.setattr(Local, "session", cells_here)
        __main__.main()


@pytest.fixture
def runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Local, "session", cells_here)
    undraw(monkeypatch)


def run(*words: object) -> int:
    """The exit code of `normattn WORDS…`, in this process."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


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
        name, said = self.err.strip().splitlines()[-1].split(": ", 1)
        assert name == "normattn"
        return said


@dataclass(frozen=True)
class Command:
    """Run `normattn ARGUMENTS…` in this process and return what it said."""

    capfd: pytest.CaptureFixture[str]

    def __call__(self, *arguments: object) -> Said:
        self.capfd.readouterr()
        code = run(*arguments)
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


FINISHED = ("--variants", "KNA", "--methods", "unmodified,YaRN", "--set", "training.steps=2")
"""What the study of `finished` was asked for."""


@pytest.fixture(scope="session")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished keynorm study of one run, for every test: copy it to change it."""
    out = tmp_path_factory.mktemp("finished") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Local, "session", cells_here)
        undraw(patch)
        assert run("reproduce", "keynorm", "--preset", tiny, *FINISHED, "--out", out) == 0
    return out


COMMAND = """
import os
os.environ.update(OMP_NUM_THREADS="1", COLUMNS="200")
from studies import conftest
conftest.run_here({cells_here})
"""


class Start(Protocol):
    def __call__(self, *arguments: object, cells_here: bool = False) -> apart.Program:
        """Begin."""


@pytest.fixture
def start() -> Iterator[Start]:
    """Start `normattn ARGUMENTS…`, undrawn, in a process that is gone when the test ends."""
    started: list[apart.Program] = []

    def begin(*arguments: object, cells_here: bool = False) -> apart.Program:
        started.append(apart.Program(COMMAND.format(cells_here=cells_here), *arguments))
        return started[-1]

    yield begin
    for process in started:
        process.clear()

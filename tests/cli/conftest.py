"""A command-line run inside the test's own process, and one tiny trained run to use it on."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from normattn.cli.app import main
from undrawn import undraw

TINY = """
summary = "for tests"

[training]
steps = 4
batch_size = 4
checkpoint_seconds = 1000

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
max_windows = 4
"""


@dataclass(frozen=True)
class Said:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The one line on stderr, without the program's name."""
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("normattn: ")
        assert "Traceback" not in self.err
        return lines[0].removeprefix("normattn: ")


Command = Callable[..., Said]


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Run `normattn ARGUMENTS…` and return what it said."""

    def run(*arguments: object) -> Said:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        said = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return Said(ended.value.code, said.out, said.err)

    return run


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without charts."""
    undraw(monkeypatch)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a few texts."""
    folder = tmp_path_factory.mktemp("corpus")
    for n in range(12):
        words = " ".join(f"word{(n * 7 + i * i) % 50}" for i in range(200))
        (folder / f"text{n:02}.txt").write_text(words)
    return folder


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
    with pytest.raises(SystemExit) as ended:
        main(["train", "--preset", str(tiny), "--score", "KNA", "--out", str(out)])
    assert ended.value.code == 0
    return out


@pytest.fixture(scope="session")
def listed() -> dict[str, dict[str, Any]]:
    """What `normattn list --json` says of each part."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit) as ended:
        main(["list", "--json"])
    assert ended.value.code == 0
    return {part["name"]: part for part in json.loads(said.getvalue())}

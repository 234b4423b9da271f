"""What the operating system or a library refuses, in a sentence; and what commands import."""

from __future__ import annotations

import errno
import io
import json
import os
import shlex
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from normattn import __main__
from normattn.cli.failures import exit_code_of
from normattn.errors import InputError
from normattn.io import default_cache_dir, expand_path


def _chained(cause: BaseException) -> Exception:
    error = RuntimeError("a library failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/disk/file"),
            "no space left on the disk that holds /disk/file; make room and rerun the command",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "/x: Permission denied"),
        (OSError("<urlopen error timed out>"), "<urlopen error timed out>"),
        (SafetensorError("I/O error: File too large (os error 27)"), "no space left on the disk"),
        (Exception("Input/output error (os error 5)"), "Input/output error"),
        (_chained(OSError(errno.ENOSPC, "No space left")), "no space left on the disk"),
        (MemoryError("Unable to allocate 7 TiB"), "out of memory (Unable to allocate 7 TiB); "),
        (_chained(MemoryError()), "out of memory; take smaller batches"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory ("),
        (torch.OutOfMemoryError("CUDA out of memory."), "out of memory (CUDA out of memory.)"),
        (RuntimeError("can't start new thread"), "no thread can be started"),
    ],
)
def test_a_refusal_of_the_system_is_one_sentence(
    error: Exception, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(error) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"normattn: {sentence}")
    assert len(said.splitlines()) == 1


def test_an_error_of_our_own_is_not_hidden() -> None:
    assert exit_code_of(KeyError("ours")) is None
    assert exit_code_of(RuntimeError("ours (os error)")) is None


def test_a_user_without_a_home_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import pwd

    def unknown(number: int) -> object:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "NORMATTN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for place in (default_cache_dir, partial(expand_path, "~/runs")):
        with pytest.raises(InputError, match="home directory"):
            place()
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_cache_dir() == Path("/caches/normattn")


# A mistake that is found before a library is imported.
_MISTAKE = shlex.join([sys.executable, "-m", "normattn", "train", "--steps", "zero"])
_VERSION = shlex.join([sys.executable, "-m", "normattn", "--version"])


@pytest.mark.parametrize(
    ("shell", "code", "lines", "word"),
    [
        ("cd $(mktemp -d) && rmdir $PWD && exec {}", 2, 1, "working directory"),
        ("exec {} >&-", 2, 1, "output is closed"),
        ("exec {} 2>&-", 2, 0, ""),
        ("exec {} >&- 2>&-", 2, 0, ""),
        ("exec {} <&-", 2, 1, "--steps"),
        ("exec {} 2>/dev/full", 2, 0, ""),
        (f"{_VERSION} >/dev/full", 2, 1, "no space left"),
        (f"{_VERSION} | true; exit ${{{{PIPESTATUS[0]}}}}", 1, 0, ""),
    ],
)
def test_a_lost_place_is_one_sentence(shell: str, code: int, lines: int, word: str) -> None:
    command = shell.format(_MISTAKE)
    # Python itself complains at its end of what is left in a buffer.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=buffered)
    said = ended.stderr.strip().splitlines()
    assert (ended.returncode, len(said)) == (code, lines), ended.stderr
    assert all(line.startswith("normattn: ") and word in line for line in said)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_warning_is_a_sentence_and_bars_of_libraries_are_for_terminals(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Carriage returns of tqdm in a log are many copies of one bar."""

    class Stderr(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(sys, "argv", ["normattn", "--version"])
    monkeypatch.setattr(sys, "stderr", Stderr())
    monkeypatch.setenv("TQDM_DISABLE", "so that it is restored")
    monkeypatch.delenv("TQDM_DISABLE")
    with pytest.raises(SystemExit):
        __main__._command()
    assert ("TQDM_DISABLE" in os.environ) is not terminal
    said = warnings.formatwarning("the cache is damaged", UserWarning, __file__, 1)
    assert said == "warning: the cache is damaged\n"


# What a command or a module imports, by name: time is another thing on each machine.
SLOW = {"matplotlib", "sympy", "transformers", "torch._dynamo", "torch._inductor", "triton"}
"""What takes a second or more to import, and what no listing, help or protocol needs."""
PROGRAM = """
import json, sys
from normattn.cli.app import main

def held():
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)

for words in (["--help"], ["train", "--help"], ["list"]):
    try: main(words)
    except SystemExit as ended: assert ended.code == 0
    if words[0] != "--help": held()
import normattn.lab.evaluation.language_model, normattn.lab.training, normattn.lab.sweep.runner
held()
import normattn.cli.export, normattn.lab.report.output
held()
"""


def test_a_command_waits_for_no_library_that_it_does_not_need() -> None:
    """A fresh interpreter: after help, a listing, and with protocols, training and reports."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    held = [set(json.loads(line)) for line in done.stderr.splitlines()[-4:]]
    help_, listing, protocols, reports = held
    assert "normattn.cli.options" in help_
    assert not help_ & {"torch", "numpy", *SLOW}
    assert "normattn.score.parts" in listing
    more = {"normattn.layers.explain", "normattn.models", "normattn.lab.training"}
    assert not listing & {*more, *SLOW}
    # What is trained and measured draws nothing and compiles nothing.
    assert {"normattn.lab.evaluation.language_model", "normattn.lab.training.step"} <= protocols
    assert not protocols & {*SLOW, "scipy"}
    assert "normattn.lab.report.output" in reports
    assert not reports & {"altair", "vl_convert"}

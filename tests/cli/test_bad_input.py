"""Every mistake, and what the system refuses: one sentence, exit code 2, nothing half-written."""

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
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from normattn import __main__
from normattn.cli.failures import exit_code_of
from normattn.errors import InputError
from normattn.io import default_cache_dir, expand_path
from studies.conftest import Command


def leftovers(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def assert_refused(command: Command, folder: Path, expected: list[str], *arguments: object) -> None:
    """Exit code 2 and a sentence that has these words; nothing in the folder changes."""
    before = leftovers(folder)
    said = command(*arguments)
    assert all(part in said.sentence for part in expected), said.sentence
    assert leftovers(folder) == before


OPTIONS: dict[str, list[tuple[list[str], list[str]]]] = {
    "train": [
        (["--score", "KNAA"], ["KNAA", "did you mean KNA"]),
        (["--score", ""], ["is empty", "--score"]),
        (["--steps", "0"], ["--steps", "1"]),
        (["--heads", "3"], ["16", "3 heads"]),
        (["--set", "data.vocab_size=12"], ["vocab_size", "at least 257", "12"]),
        (["--corpus", "synthetic:copy", "--set", "data.max_bytes=9"], ["max_bytes has no meaning"]),
        (["--optimiser", "sgd"], ["optimiser", "adamw", "tiger"]),
        (["--colour", "red"], ["--colour"]),
        (["--set", "model.dims=8"], ["model.dims", "did you mean model.dim"]),
        (["--set", "steps"], ["key=value"]),
        (["--set="], ["is empty", "--set="]),
        (["--set=device="], ["device", "pattern"]),
        (["--preset=gone="], ["gone=", "did you mean"]),
        (["--set", "steps=1", "--set", "steps=2"], ["steps", "twice"]),
        (["--set", "steps=2", "--steps", "3"], ["steps", "--set"]),
        (["--set", "steps.more=1"], ["steps.more", "group"]),
        (["--set", "unit_weights=true"], ["unit_weights", "placement nGPT"]),
        (["--preset", "smokey"], ["smokey", "did you mean smoke"]),
        (["--preset", "gone.toml"], ["gone.toml", "does not exist"]),
    ],
    "reproduce": [
        (["--preset", "labtop"], ["labtop", "did you mean laptop"]),
        (["--variants", "Baseline,KNX"], ["KNX", "did you mean KNA"]),
        (["--variants", "KNA-YaRN"], ["YaRN", "--methods"]),
        (["--methods", "ReRope2"], ["did you mean ReRoPE"]),
        (["--seeds", "0"], ["--seeds", "at least 1"]),
        (["--seeds", "107"], ["--seeds", "at most 100", "of one: 7,"]),
        (["--set", "training.stepz=1"], ["stepz", "did you mean steps"]),
        (["--set", "steps=10"], ["did you mean training.steps?"]),
        (["--set", "training.seed=1"], ["seed", "varied by the study"]),
        (
            ["--corpus", "python-source", "--set", 'training.data={corpus="hf:a"}'],
            ["training.data.corpus is given both as an option and by --set"],
        ),
        (["--seeds", "2", "--set", "seeds=3"], ["seeds is given both as an option and by --set"]),
        (["--launcher", "slrum"], ["no launcher is called 'slrum': did you mean slurm"]),
        (
            ["--launcher=slurm", "--set=launcher.partitoin=a"],
            ["partitoin", "did you mean partition"],
        ),
        (["--launcher", "ray", "--set", "launcher.gpus=-1"], ["the ray launcher: gpus"]),
    ],
    "evaluate": [
        (["--methods", "YARN2"], ["YARN2", "did you mean YaRN"]),
        (["--methods", "KNA"], ["KNA", "training-time"]),
        (["--methods", "YaRN,,NTK"], ["--methods", "empty"]),
        (["--methods", "YaRN,YaRN"], ["twice"]),
        (["--methods", "NTK-ReRoPE"], ["cannot be combined"]),
        (["--methods", "al"], ["unknown", "al"]),
        (["--protocols", "retreival"], ["retreival", "did you mean retrieval"]),
        (["--protocols", "last_segmet"], ["last_segmet", "did you mean last-segment"]),
        (["--protocols", "retrieval", "--multiples", "1,8"], ["8 tokens is too short for passkey"]),
        (["--protocols", "by-position", "--multiples", "9000"], ["long enough", "longest"]),
        (["--protocols", "train-length,repeated", "--multiples", "1"], ["--multiples above 1"]),
        (["--multiples", "0"], ["--multiples", "at least 1"]),
        (["--multiples", "4,2"], ["multiples", "rise"]),
        (["--max-windows", "0"], ["--max-windows"]),
        (["--max-tokens", "0"], ["--max-tokens"]),
        (["--seed", "-1"], ["--seed"]),
    ],
    "generate": [
        ([], ["--prompt", "--file"]),
        (["--prompt", ""], ["argument 3 is empty", "--prompt"]),
        (["--file", "gone.txt"], ["gone.txt", "does not exist"]),
        (["--prompt", "a", "--method", "logn"], ["logn is a training-time component"]),
        (["--prompt", "a", "--method", "YaRN(factor=0)"], ["factor", "at least 1"]),
        (["--prompt", "a", "--temperature", "-1"], ["temperature is -1"]),
        (["--prompt", "a", "--top-p", "2", "--temperature", "1"], ["top_p is 2"]),
        (["--prompt", "a", "--top-k", "5"], ["temperature 0", "top_k"]),
        (["--prompt", "a", "--max-new-tokens", "0"], ["--max-new-tokens"]),
        (["--prompt", "a", "--stop", ""], ["argument 5 is empty", "--stop"]),
    ],
    "inspect": [
        (["--attention", "9,0"], ["layers 0 to 0", "heads 0 to 1"]),
        (["--attention", "one"], ["LAYER,HEAD", "'one'"]),
        (["--text", "gone.txt"], ["gone.txt", "does not exist"]),
        (["--length", "100000"], ["is long enough", "100,000"]),
        (["--method", "YARN"], ["YARN", "did you mean YaRN"]),
        (["--windows", "0"], ["--windows"]),
        (["--out", "/dev/null"], ["/dev/null: File exists"]),
    ],
}


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [(name, *case) for name, cases in OPTIONS.items() for case in cases],
)
def test_options(
    command: Command, tiny: Path, run: Path, tmp_path: Path, name: str, options: Any, words: Any
) -> None:
    training: list[object] = ["--preset", tiny, "--out", tmp_path / "out"]
    given = {"train": training, "reproduce": ["keynorm", *training]}.get(name, [run])
    assert_refused(command, tmp_path, words, name, *given, *options)


def test_corpora_that_cannot_be_used(command: Command, tiny: Path, tmp_path: Path) -> None:
    train = ("train", "--preset", tiny, "--out", tmp_path / "run")
    (tmp_path / "texts").mkdir()
    (tmp_path / "small.txt").write_text("ab")
    for name, word in (("gone", "gone"), ("texts", "texts"), ("small.txt", "too small")):
        assert_refused(command, tmp_path, [word], *train, "--corpus", tmp_path / name)
    if os.geteuid():  # root reads everything
        secret = tmp_path / "secret.txt"
        secret.write_text("text " * 1000)
        secret.chmod(0)
        assert_refused(command, tmp_path, ["secret.txt"], *train, "--corpus", secret)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("bad.toml", b"steps = = 3", ["bad.toml", "TOML"]),
        ("latin.toml", b'a = "\xff"', ["latin.toml", "not UTF-8"]),
        ("bad.json", b"{", ["bad.json", "JSON"]),
        ("list.json", b"[1]", ["list.json", "object"]),
        ("unknown.toml", b"stepz = 3", ["stepz", "did you mean steps"]),
        ("notes.md", b"steps = 3", ["notes.md", ".toml"]),
    ],
)
def test_configurations(
    command: Command, tiny: Path, tmp_path: Path, name: str, content: bytes, expected: list[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    train = ("train", tmp_path / name, "--preset", tiny, "--out", tmp_path / "run")
    assert_refused(command, tmp_path, expected, *train)


@pytest.mark.parametrize("name", ["train", "reproduce"])
@pytest.mark.parametrize(
    ("model", "expected"), [("", "it is missing"), ("model = 3", "got 3"), ("model = []", "got []")]
)
def test_no_model(command: Command, tmp_path: Path, name: str, model: str, expected: str) -> None:
    preset = tmp_path / "own.toml"
    preset.write_text(f'summary = "own"\n[training]\nsteps = 3\n{model}\n')
    words = ["training: model must be a group of settings, as dim and layers", expected]
    given = [*["keynorm"] * (name == "reproduce"), "--preset", preset, "--out", tmp_path / "run"]
    assert_refused(command, tmp_path, words, name, *given)


def test_places_that_are_taken(command: Command, tiny: Path, trained: Path, tmp_path: Path) -> None:
    train, thesis = ("train", "--preset", tiny, "--out"), tmp_path / "thesis.tex"
    thesis.write_text("dear")
    assert_refused(command, tmp_path, ["thesis.tex"], *train, tmp_path)
    assert_refused(command, tmp_path, [str(thesis)], *train, thesis / "x")
    assert_refused(command, tmp_path, ["gone.toml"], *train, tmp_path, tmp_path / "gone.toml")
    other = ["model.score", "QNA", "KNA", str(trained)]
    assert_refused(command, trained, other, *train, trained, "--score", "QNA")


def test_folders_without_runs(command: Command, tmp_path: Path) -> None:
    assert_refused(command, tmp_path, ["no config.json"], "evaluate", tmp_path)
    assert_refused(command, tmp_path, ["normattn evaluate"], "report", tmp_path)
    assert_refused(command, tmp_path, ["no directory"], "report", tmp_path / "gone")


# What the operating system or a library refuses.
def _chained(cause: BaseException) -> Exception:
    error = RuntimeError("a library failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(errno.ENOSPC, "No space", "/d/f"), "no space left on the disk that holds /d/f; "),
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
def test_refusals_of_the_system_are_sentences(
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
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
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
    # Python itself complains at its end of what is left in a buffer.
    command = ["env", "-u", "PYTHONUNBUFFERED", "bash", "-c", shell.format(_MISTAKE)]
    ended = subprocess.run(command, capture_output=True, text=True)
    said = ended.stderr.strip().splitlines()
    assert (ended.returncode, len(said)) == (code, lines), ended.stderr
    assert all(line.startswith("normattn: ") and word in line for line in said)


@pytest.mark.parametrize("terminal", [False, True])
def test_warnings_and_bars_of_libraries(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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

"""Every mistake a user can make: one clear sentence, exit code 2, nothing half-written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cli.conftest import Command


def leftovers(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def assert_refused(command: Command, folder: Path, expected: list[str], *arguments: object) -> None:
    """Exit code 2 and a sentence that has these words; nothing in the folder changes."""
    before = leftovers(folder)
    said = command(*arguments)
    for part in expected:
        assert part in said.sentence
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
    ],
    "evaluate": [
        (["--methods", "YARN2"], ["YARN2", "did you mean YaRN"]),
        (["--methods", "KNA"], ["KNA", "training-time"]),
        (["--methods", "YaRN,,NTK"], ["--methods", "empty"]),
        (["--methods", "YaRN,YaRN"], ["twice"]),
        (["--methods", "NTK-ReRoPE"], ["cannot be combined"]),
        (["--methods", "al"], ["unknown", "al"]),
        (["--protocols", "retreival"], ["retreival", "did you mean retrieval"]),
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
    ("name", "options", "expected"),
    [(name, *case) for name, cases in OPTIONS.items() for case in cases],
)
def test_options(
    command: Command,
    tiny: Path,
    run: Path,
    tmp_path: Path,
    name: str,
    options: list[str],
    expected: list[str],
) -> None:
    training: list[object] = ["--preset", tiny, "--out", tmp_path / "out"]
    given = {"train": training, "reproduce": ["keynorm", *training]}.get(name, [run])
    assert_refused(command, tmp_path, expected, name, *given, *options)


def test_corpora_that_cannot_be_used(command: Command, tiny: Path, tmp_path: Path) -> None:
    train = ("train", "--preset", tiny, "--out", tmp_path / "run")
    (tmp_path / "texts").mkdir()
    (tmp_path / "small.txt").write_text("ab")
    for name, word in (("gone", "gone"), ("texts", "texts"), ("small.txt", "too small")):
        assert_refused(command, tmp_path, [word], *train, "--corpus", tmp_path / name)
    if os.geteuid():  # root reads everything
        (tmp_path / "secret.txt").write_text("text " * 1000)
        (tmp_path / "secret.txt").chmod(0)
        assert_refused(
            command, tmp_path, ["secret.txt"], *train, "--corpus", tmp_path / "secret.txt"
        )


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
def test_presets_without_a_model(
    command: Command, tmp_path: Path, name: str, model: str, expected: str
) -> None:
    (tmp_path / "own.toml").write_text(f'summary = "own"\n[training]\nsteps = 3\n{model}\n')
    study = ["keynorm"] if name == "reproduce" else []
    preset = tmp_path / "own.toml"
    words = ["training: model must be a group of settings, as dim and layers", expected]
    assert_refused(
        command, tmp_path, words, name, *study, "--preset", preset, "--out", tmp_path / "run"
    )


def test_places_that_are_taken(command: Command, tiny: Path, trained: Path, tmp_path: Path) -> None:
    train = ("train", "--preset", tiny, "--out")
    (tmp_path / "thesis.tex").write_text("dear")
    assert_refused(command, tmp_path, ["thesis.tex"], *train, tmp_path)
    assert_refused(
        command, tmp_path, [str(tmp_path / "thesis.tex")], *train, tmp_path / "thesis.tex" / "x"
    )
    assert_refused(
        command, tmp_path, ["gone.toml"], "train", tmp_path / "gone.toml", "--out", tmp_path
    )
    other = ["model.score", "QNA", "KNA", str(trained)]
    assert_refused(command, trained, other, *train, trained, "--score", "QNA")


def test_folders_without_runs(command: Command, tmp_path: Path) -> None:
    assert_refused(command, tmp_path, ["no config.json"], "evaluate", tmp_path)
    assert_refused(command, tmp_path, ["normattn evaluate"], "report", tmp_path)
    assert_refused(command, tmp_path, ["no directory"], "report", tmp_path / "gone")


def full(handle: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_no_space_left_for_a_run(
    command: Command, tiny: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens are there since `trained`: the first file is the run's own."""
    arguments = ("train", "--preset", tiny, "--score", "QNA", "--out", tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        said = command(*arguments)
    assert "no space left on the disk" in said.sentence
    # A lock stays where it is: another process may be waiting for it.
    assert leftovers(tmp_path) == ["run/.lock"]
    command.done(*arguments)

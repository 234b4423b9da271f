"""Every mistake a user can make: one clear sentence, exit code 2, nothing half-written."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from cli.conftest import Command


def leftovers(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        ("KNAA", ["KNAA", "did you mean KNA"]),
        ("Baselin-logn", ["Baselin", "did you mean Baseline"]),
        ("KNA-YaRN-NoPE", ["YaRN on NoPE makes no sense", "rotary"]),
        ("KNA-QNA", ["cannot be combined", "variant"]),
        ("KNA(colour=1)", ["KNA", "colour"]),
        ("", ["is empty", "--score"]),
        ("BatchNormedEverything", ["BatchNormedEverything", "normattn list"]),
    ],
)
def test_scores(
    command: Command, tiny: Path, tmp_path: Path, score: str, expected: list[str]
) -> None:
    said = command("train", "--preset", tiny, "--score", score, "--out", tmp_path / "run")
    assert said.code == 2
    for part in expected:
        assert part in said.sentence
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--steps", "0"], ["--steps", "1"]),
        (["--steps", "many"], ["--steps", "integer"]),
        (["--length", "1"], ["--length", "2"]),
        (["--dim", "-8"], ["--dim", "1"]),
        (["--dim", "15"], ["dim", "15", "heads"]),
        (["--heads", "3"], ["16", "3 heads"]),
        (["--lr", "-1"], ["optimiser", "lr", "greater than 0"]),
        (["--batch-size", "0"], ["--batch-size"]),
        (["--vocab-size", "1"], ["--vocab-size", "2"]),
        (["--vocab-size", "12"], ["vocab_size", "at least 257", "12"]),
        (["--precision", "fp8"], ["precision", "fp32"]),
        (["--optimiser", "sgd"], ["optimiser", "adamw", "tiger"]),
        (["--placement", "MidLN"], ["placement", "PreLN"]),
        (["--block", "mlp"], ["block", "mha"]),
        (["--seed", "-1"], ["--seed"]),
        (["--threads", "0"], ["--threads"]),
        (["--colour", "red"], ["--colour"]),
        (["--set", "model.dims=8"], ["model.dims", "did you mean model.dim"]),
        (["--set", "learning_rate=1"], ["learning_rate"]),
        (["--set", "steps"], ["key=value"]),
        (["--set="], ["is empty", "--set="]),
        (["--set=device="], ["device", "pattern"]),
        (["--preset=gone="], ["gone=", "did you mean"]),
        (["--set", "steps=1", "--set", "steps=2"], ["steps", "twice"]),
        (["--set", "steps=2", "--steps", "3"], ["steps", "--set"]),
        (["--set", "steps.more=1"], ["steps.more", "group"]),
        (["--set", "data.tiled_fraction=1.5"], ["tiled_fraction", "less than or equal to 1"]),
        (["--set", "device=tpu"], ["device"]),
        (["--set", "accumulate=3"], ["accumulate", "batch_size 4"]),
        (["--preset", "smokey"], ["smokey", "did you mean smoke"]),
        (["--preset", "gone.toml"], ["gone.toml", "does not exist"]),
    ],
)
def test_options(
    command: Command, tiny: Path, tmp_path: Path, options: list[str], expected: list[str]
) -> None:
    said = command("train", "--preset", tiny, "--out", tmp_path / "run", *options)
    assert said.code == 2
    for part in expected:
        assert part in said.sentence
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("empty.txt", b"", ["empty"]),
        ("latin.txt", "é".encode("latin-1") * 400, ["UTF-8"]),
        ("small.txt", b"ab", ["too small", "sequence"]),
        ("broken.jsonl", b'{"text": "good"}\n{"text": \n', ["broken.jsonl", "line 2"]),
        ("broken.parquet", b"PAR1 and no more", ["broken.parquet"]),
        ("image.png", b"\x89PNG", ["image.png"]),
    ],
)
def test_corpora(
    command: Command, tiny: Path, tmp_path: Path, name: str, content: bytes, expected: list[str]
) -> None:
    corpus = tmp_path / name
    corpus.write_bytes(content)
    said = command("train", "--preset", tiny, "--corpus", corpus, "--out", tmp_path / "run")
    assert said.code == 2
    for part in expected:
        assert part in said.sentence
    assert leftovers(tmp_path) == [name]


def test_a_missing_corpus(command: Command, tiny: Path, tmp_path: Path) -> None:
    said = command(
        "train", "--preset", tiny, "--corpus", tmp_path / "gone", "--out", tmp_path / "r"
    )
    assert said.code == 2
    assert "gone" in said.sentence
    assert leftovers(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_corpus(command: Command, tiny: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "secret.txt"
    corpus.write_text("text " * 1000)
    corpus.chmod(0)
    said = command("train", "--preset", tiny, "--corpus", corpus, "--out", tmp_path / "run")
    assert said.code == 2
    assert "secret.txt" in said.sentence


def test_an_empty_folder(command: Command, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    said = command(
        "train", "--preset", tiny, "--corpus", tmp_path / "texts", "--out", tmp_path / "run"
    )
    assert said.code == 2
    assert "texts" in said.sentence


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("bad.toml", "steps = = 3", ["bad.toml", "TOML"]),
        ("bad.json", "{", ["bad.json", "JSON"]),
        ("list.json", "[1]", ["list.json", "object"]),
        ("unknown.toml", "stepz = 3", ["stepz", "did you mean steps"]),
        ("type.toml", "steps = 'three'", ["steps", "three"]),
        ("notes.md", "steps = 3", ["notes.md", ".toml"]),
    ],
)
def test_configurations(
    command: Command, tiny: Path, tmp_path: Path, name: str, content: str, expected: list[str]
) -> None:
    (tmp_path / name).write_text(content)
    said = command("train", tmp_path / name, "--preset", tiny, "--out", tmp_path / "run")
    assert said.code == 2
    for part in expected:
        assert part in said.sentence
    assert leftovers(tmp_path) == [name]


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
    said = command(name, *study, "--preset", preset, "--out", tmp_path / "run")
    assert said.code == 2
    assert f"training: model must be a group of settings, as dim and layers; {expected}" in (
        said.sentence
    )
    assert leftovers(tmp_path) == ["own.toml"]


def test_a_missing_configuration(command: Command, tmp_path: Path) -> None:
    said = command("train", tmp_path / "gone.toml", "--out", tmp_path / "run")
    assert said.code == 2
    assert "gone.toml" in said.sentence


def test_a_directory_of_another_run(command: Command, tiny: Path, trained: Path) -> None:
    before = leftovers(trained)
    said = command("train", "--preset", tiny, "--score", "QNA", "--out", trained)
    assert said.code == 2
    for part in ("model.score", "QNA", "KNA", str(trained)):
        assert part in said.sentence
    assert leftovers(trained) == before


def test_a_directory_of_other_files(command: Command, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("dear")
    said = command("train", "--preset", tiny, "--out", tmp_path)
    assert said.code == 2
    assert "thesis.tex" in said.sentence
    assert leftovers(tmp_path) == ["thesis.tex"]


def test_a_damaged_run(command: Command, tiny: Path, trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / "config.json").write_text('{"format": 1')
    said = command("train", "--preset", tiny, "--score", "KNA", "--out", run)
    assert said.code == 2
    assert "config.json is damaged" in said.sentence


def test_a_damaged_model(command: Command, trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    weights = run / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-40])
    said = command("evaluate", run)
    assert said.code == 2
    assert "model.safetensors is damaged" in said.sentence


def test_every_checkpoint_damaged(
    command: Command, tiny: Path, trained: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / "status.json").unlink()
    for file in run.glob("checkpoints/*/tensors.safetensors"):
        file.write_bytes(b"nothing")
    said = command("train", "--preset", tiny, "--score", "KNA", "--out", run)
    assert said.code == 2
    assert "is damaged" in said.err
    assert "every checkpoint" in said.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--methods", "YARN2"], ["YARN2", "did you mean YaRN"]),
        (["--methods", "KNA"], ["KNA", "trained in"]),
        (["--methods", "YaRN,,NTK"], ["--methods", "empty"]),
        (["--methods", "YaRN,YaRN"], ["twice"]),
        (["--methods", "NTK-ReRoPE"], ["cannot be combined"]),
        (["--protocols", "last-segmnt"], ["did you mean last-segment"]),
        (["--multiples", "0"], ["--multiples", "at least 1"]),
        (["--multiples", "4,2"], ["multiples", "rise"]),
        (["--multiples", "8", "--lengths", "64"], ["twice"]),
        (["--lengths", "12"], ["12", "training length 8"]),
        (["--multiples", "100000"], ["long enough", "longest"]),
        (["--max-windows", "0"], ["--max-windows"]),
        (["--max-tokens", "0"], ["--max-tokens"]),
        (["--seed", "-1"], ["--seed"]),
    ],
)
def test_evaluations(
    command: Command, trained: Path, options: list[str], expected: list[str]
) -> None:
    before = leftovers(trained)
    said = command("evaluate", trained, *options)
    assert said.code == 2
    for part in expected:
        assert part in said.sentence
    assert leftovers(trained) == before


def test_evaluating_what_is_no_run(command: Command, tmp_path: Path) -> None:
    assert "no config.json" in command("evaluate", tmp_path).sentence


def test_evaluating_an_unfinished_run(command: Command, trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**status, "state": "interrupted", "step": 2}))
    said = command("evaluate", run)
    assert said.code == 2
    assert "interrupted at step 2" in said.sentence


def test_reporting_nothing(command: Command, tmp_path: Path) -> None:
    said = command("report", tmp_path)
    assert said.code == 2
    assert "normattn evaluate" in said.sentence
    assert "no directory" in command("report", tmp_path / "gone").sentence


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--preset", "labtop"], ["labtop", "did you mean laptop"]),
        (["--variants", "Baseline,KNX"], ["KNX", "did you mean KNA"]),
        (["--variants", "KNA-YaRN"], ["YaRN", "--methods"]),
        (["--variants", "KNA,KNA"], ["twice"]),
        (["--variants", "QKBatchNorm"], ["see the future"]),
        (["--methods", "ReRope2"], ["did you mean ReRoPE"]),
        (["--methods", "logn"], ["trained in"]),
        (["--seeds", "0"], ["--seeds", "at least 1"]),
        (["--seeds", "107"], ["--seeds", "at most 100", "of one: 7,"]),
        (["--seeds", "1,x"], ["--seeds"]),
        (["--jobs", "0"], ["--jobs"]),
        (["--set", "training.stepz=1"], ["stepz", "did you mean steps"]),
        (["--set", "evaluation.multiples=[]"], ["multiples"]),
        (["--set", "training.seed=1"], ["seed", "varied by the table"]),
        (["--corpus", "/nowhere/at/all"], ["/nowhere/at/all"]),
        (
            ["--corpus", "python-source", "--set", 'training.data={corpus="hf:a"}'],
            ["training.data.corpus is given both as an option and by --set"],
        ),
        (["--seeds", "2", "--set", "seeds=3"], ["seeds is given both as an option and by --set"]),
    ],
)
def test_reproductions(
    command: Command, tiny: Path, tmp_path: Path, options: list[str], expected: list[str]
) -> None:
    preset = [] if "--preset" in options else ["--preset", str(tiny)]
    said = command("reproduce", "keynorm", *preset, "--out", tmp_path / "out", *options)
    assert said.code == 2
    for part in expected:
        assert part in said.sentence
    assert leftovers(tmp_path) == []


def full(handle: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_no_space_left_for_a_run(
    command: Command,
    tiny: Path,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tokens are there since `trained`: the first file is the run's own."""
    arguments = ("train", "--preset", tiny, "--score", "QNA", "--out", tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        said = command(*arguments)
    assert said.code == 2
    assert "no space left on the disk" in said.sentence
    # A lock stays where it is: another process may be waiting for it.
    assert leftovers(tmp_path) == ["run/.lock"]
    assert command(*arguments).code == 0


def test_no_space_left_for_the_tokens(
    command: Command, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = tmp_path / "new.txt"
    corpus.write_text(" ".join(f"new{n * n % 97}" for n in range(2000)))
    monkeypatch.setattr(os, "fsync", full)
    arguments = ("train", "--preset", tiny, "--corpus", corpus, "--out", tmp_path / "run")
    said = command(*arguments)
    assert said.code == 2
    assert "no space left on the disk" in said.sentence
    assert leftovers(tmp_path) == ["new.txt"]


def test_no_space_left_at_a_checkpoint(
    command: Command, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from normattn.lab.runs import Checkpoints

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = tmp_path / "run"
    arguments = ("train", "--preset", tiny, "--score", "QNA", "--out", run)
    with monkeypatch.context() as patch:
        save = Checkpoints.save
        patch.setattr(
            Checkpoints,
            "save",
            lambda *given: (patch.setattr(os, "fsync", full), save(*given))[1],
        )
        said = command(*arguments)
    assert said.code == 2
    assert "no space left on the disk" in said.sentence
    assert not list(run.glob("checkpoints/*"))
    # With room again, the same command resumes.
    assert command(*arguments).code == 0


def test_a_place_that_cannot_be_written(command: Command, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = command("train", "--preset", tiny, "--out", tmp_path / "file" / "run")
    assert said.code == 2
    assert str(tmp_path / "file") in said.sentence

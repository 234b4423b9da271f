"""What a finished run holds is what it left: anything else is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import Command


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "another number": lambda file: file.write_bytes(file.read_bytes().replace(b"1", b"2", 1)),
    "gone": lambda file: file.unlink(),
    "a folder": _folder,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("metrics.jsonl", (["report", "RUN", "--out", "PLACE"], ["export", "RUN", "PLACE"])),
        ("tokeniser.json", (["export", "RUN", "PLACE"], ["generate", "RUN", "--prompt", "word1"])),
    ],
)
def test_a_file_that_is_not_as_the_run_left_it(
    command: Command, run: Path, tmp_path: Path, name: str, lines: Any, damage: str
) -> None:
    DAMAGES[damage](run / name)
    places = {"RUN": run, "PLACE": tmp_path / "place"}
    for line in lines:
        assert str(run / name) in command(*(places.get(word, word) for word in line)).sentence
    assert [each.name for each in tmp_path.iterdir()] == ["runs"]


def test_a_run_without_digests_is_read(command: Command, run: Path, tmp_path: Path) -> None:
    status = json.loads((run / "status.json").read_text())
    assert set(status.pop("files")) == {"metrics.jsonl", "corpus.json", "tokeniser.json"}
    (run / "status.json").write_text(json.dumps(status))
    command.done("export", run, tmp_path / "model")


def test_a_record_that_is_a_folder_is_refused_before_the_work(command: Command, run: Path) -> None:
    line = ["evaluate", run, "--multiples", "1", "--max-windows", "1"]
    command.done(*line)
    record = min((run / "evaluations").glob("*.parquet"))
    record.unlink()
    record.mkdir()
    assert f"{record} is not a file" in command(*line).sentence


def test_a_finished_run_whose_model_is_damaged_says_how_to_go_on(
    command: Command, run: Path, tiny: Path
) -> None:
    weights = run / "model" / "model.safetensors"
    whole = weights.read_bytes()
    train = ("train", "--preset", tiny, "--score", "KNA", "--out", run)
    for content in (whole[:-1] + b"x", whole[:-4]):
        weights.write_bytes(content)
        sentence = command(*train).sentence
        assert f"{weights} is damaged" in sentence
        assert "delete its status.json to resume from the last checkpoint" in sentence
    (run / "status.json").unlink()
    command.done(*train)
    assert weights.read_bytes() == whole


@pytest.mark.parametrize("line", [["evaluate", "--multiples", 1], ["inspect", "--windows", 1]])
def test_a_corpus_that_changed_since_the_training(
    command: Command, run: Path, corpus: Path, tmp_path: Path, line: list[object]
) -> None:
    others = Path(shutil.copytree(corpus, tmp_path / "corpus"))
    for file in others.iterdir():
        file.write_text(file.read_text().replace("word", "other"))
    stored = json.loads((run / "config.json").read_text())
    stored["config"]["data"]["corpus"] = str(others)
    (run / "config.json").write_text(json.dumps(stored))
    name, *options = line
    sentence = command(name, run, *options).sentence
    assert f"{run} was trained on other data: {run / 'corpus.json'}" in sentence
    # Runs from before the record was kept say nothing.
    (run / "corpus.json").unlink()
    command.done(name, run, *options)


def _study(folder: Path, cell: object = None) -> Path:
    """The directory of a study with one run; `cell` are the settings of that, if there are any."""
    (folder / "cells" / "KNA" / "seed0").mkdir(parents=True)
    job = folder / "jobs" / "KNA" / "seed0"
    job.mkdir(parents=True)
    if cell is not None:
        (job / "cell.json").write_text(json.dumps(cell))
    stored = {"format": 1, "kind": "keynorm", "config": {}}
    (folder / "config.json").write_text(json.dumps(stored))
    return job / "cell.json"


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (None, "is missing"),
        *(
            ({"study": "keynorm", **fields}, "is damaged")
            for fields in (
                {"variant": ["KNA"], "seed": 0},
                {"variant": "KNA", "seed": 1},
                {"variant": "KNA", "seed": False},
                {"variant": "KNA", "seed": 0, "row": ["KNA"]},
                {"seed": 0},
            )
        ),
        *(
            ({"study": study, "variant": "KNA", "seed": 0}, "")
            for study in (None, ["keynorm"], "keynarm", "./gone.py")
        ),
    ],
)
def test_settings_of_a_study_s_run(
    command: Command, tmp_path: Path, cell: object, words: str
) -> None:
    file = _study(tmp_path / "study", cell)
    found = command("report", tmp_path / "study", "--out", tmp_path / "page")
    assert f"{file} {words}".strip() in found.sentence


def test_a_study_without_its_settings(command: Command, tmp_path: Path) -> None:
    _study(tmp_path / "study")
    (tmp_path / "study" / "config.json").unlink()
    found = command("report", tmp_path / "study", "--out", tmp_path / "page")
    assert f"{tmp_path / 'study' / 'config.json'} is missing" in found.sentence

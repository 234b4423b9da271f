"""Several runs on one page; and a run that is not as its training left it is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from normattn.cli import report_runs
from normattn.errors import InputError
from normattn.io import read_object, write_json
from normattn.lab.report.view import View
from normattn.lab.stats import Identity, MeasurementStore, sums, with_identity
from normattn.lab.studies.reading import STUDY
from studies.conftest import Command
from studies.test_sweep import rows


def read(seed: int = 0, end: int = 16, tokens: float = 8.0, **changes: Any) -> pl.DataFrame:
    """What an evaluation of a run leaves: the loss and accuracy of three documents."""
    fields: dict[str, Any] = {"row": "KNA", "score": "KNA@8", "protocol": "last_segment"}
    fields |= {"length": 16, "train_length": 8, "data": "d", **changes}
    edges = [0.0, *(2.0**power for power in range(3, end.bit_length()))]
    counts = ([[count] * (len(edges) - 1)] * 3 for count in (4.0, tokens))
    one = sums("loss", [*"abc"], *counts, axis="position", edges=edges)
    names = ("loss", "accuracy", "accuracy_seen")
    rows = [one.with_columns(pl.lit(name).alias("statistic")) for name in names]
    return with_identity(Identity(study="", seed=seed, **fields), rows)


def copied(trained: Path, place: Path, *frames: pl.DataFrame, **settings: Any) -> Path:
    shutil.copytree(trained, place, ignore=shutil.ignore_patterns("evaluations", "model"))
    whole = read_object(place / "config.json")
    for name, value in settings.items():
        group, _, field = name.rpartition("__")
        (whole["config"][group] if group else whole["config"])[field] = value
    write_json(place / "config.json", whole)
    for number, frame in enumerate(frames):
        MeasurementStore(place / "evaluations").put(f"{number:032}", frame)
    return place


def of_runs(runs: list[Path]) -> pl.DataFrame:
    return report_runs.measured_of_runs([(None, run) for run in runs])


def test_runs_of_one_row_are_its_seeds(trained: Path, tmp_path: Path) -> None:
    alike = [copied(trained, tmp_path / f"s{n}", read(n), seed=n, threads=n + 1) for n in (0, 1)]
    assert set(of_runs(alike).select("row", "seed").rows()) == {("KNA", 0), ("KNA", 1)}
    again = copied(trained, tmp_path / "again", read())
    with pytest.raises(InputError, match=r"again and .*s0 both hold KNA seed 0"):
        of_runs([*alike, again])


def test_other_trainings_need_labels(trained: Path, tmp_path: Path) -> None:
    one = copied(trained, tmp_path / "one", read())
    other = copied(trained, tmp_path / "other", read(1), seed=1, steps=5, model__dim=32)
    with pytest.raises(InputError, match=r"row KNA, but model\.dim is 16 .* 32 .* LABEL=RUN"):
        of_runs([one, other])
    named = report_runs.measured_of_runs([("narrow", one), ("wide", other)])
    assert set(named["row"]) == {"narrow", "wide"}
    # A label does not make one row of two trainings.
    with pytest.raises(InputError, match=r"row both, but model\.dim"):
        report_runs.measured_of_runs([("both", one), ("both", other)])


def test_a_label_stands_before_a_run(command: Command, trained: Path, tmp_path: Path) -> None:
    one = copied(trained, tmp_path / "one", read())
    other = copied(trained, tmp_path / "other", read(), clip=2.0)
    command.done("report", f"loose={one}", f"PI(factor=4)={other}", "--out", tmp_path / "page")
    assert {row["row"] for row in rows(tmp_path / "page")} == {"loose", "PI(factor=4)"}
    one.rename(tmp_path / "a=b")  # A path, and no label.
    command.done("report", tmp_path / "a=b", "--out", tmp_path / "alone")
    assert {row["row"] for row in rows(tmp_path / "alone")} == {"KNA"}
    for empty in (f"={one}", "label="):
        assert "empty label" in command("report", empty).sentence
    assert "no directory" in command("report", "label=nowhere").sentence


@pytest.mark.parametrize("again", [{"data": "e"}, {"length": 32, "tokens": 4.0}])
def test_two_segments_are_no_change(trained: Path, tmp_path: Path, again: dict[str, Any]) -> None:
    run = copied(trained, tmp_path / "run", read(), read(**again))
    with pytest.raises(InputError, match=r"KNA was evaluated with other last segments"):
        of_runs([run])


def test_one_row_is_not_one_method_by_two_factors(trained: Path, tmp_path: Path) -> None:
    ways: list[dict[str, Any]] = [
        {"method": "YaRN", "score": f"KNA-YaRN(factor={n})@8"} for n in (4, 8)
    ]
    one, other = (read(n, **way) for n, way in enumerate(ways))
    runs = [copied(trained, tmp_path / str(n), rows) for n, rows in enumerate((one, other))]
    with pytest.raises(InputError, match=r"KNA with YaRN was evaluated as .*=4\)@8 and as .*=8"):
        of_runs(runs)
    # Tables of their own may be of other lengths, and so of another factor.
    apart = copied(trained, tmp_path / "apart", one, read(0, protocol="by_position", **ways[1]))
    assert of_runs([apart])["score"].n_unique() == 3


def test_what_is_left_out_is_told(command: Command, trained: Path, tmp_path: Path) -> None:
    natural: dict[str, Any] = {"protocol": "non_repeated", "data": "m"}
    runs = [copied(trained, tmp_path / str(n), read(n, **natural), seed=n) for n in (0, 1)]
    part = copied(trained, tmp_path / "part", read(2), read(2, **natural | {"data": "z"}), seed=2)
    said = command.done("report", *runs, part, "--out", tmp_path / "page")
    for word in ("KNA", "seed 2", "non_repeated at 16"):
        assert word in said.err
    none = copied(trained, tmp_path / "none", read(3, **natural | {"data": "z"}), seed=3)
    refused = command("report", *runs, none, "--out", tmp_path / "none-page")
    assert str(none) in refused.sentence


def test_rows_read_to_other_lengths_by_position() -> None:
    frames = [
        read(row=name, score=name, protocol="by_position", length=end, end=end)
        for name, end in (("short", 16), ("long", 64))
    ]
    (of_page,) = (each for each in STUDY.page.tables if each.key == "accuracy_by_position")
    table = of_page.fill(View(pl.concat(frames)))
    titles = [column.title for column in table.columns]
    assert titles[-4:] == ["1 to 8", "9 to 16", "17 to 32", "33 to 64"]
    shown = {line[0].text: [cell.text for cell in line[-4:]] for line in table.cells}
    assert shown["short"][2:] == ["–", "–"]
    assert "–" not in [*shown["short"][:2], *shown["long"]]


# Damaged runs.
def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "another number": lambda file: file.write_bytes(file.read_bytes().replace(b"1", b"2", 1)),
    "gone": Path.unlink,
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
def test_a_file_changed_since_the_run(
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


def test_a_damaged_model_says_how_to_go_on(command: Command, run: Path, tiny: Path) -> None:
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
def test_a_corpus_changed_since_the_run(
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
def test_settings_of_a_run(command: Command, tmp_path: Path, cell: object, words: str) -> None:
    file, report = _study(tmp_path / "study", cell), ("report", tmp_path / "study", "--out")
    assert f"{file} {words}".strip() in command(*report, tmp_path / "page").sentence
    settings = tmp_path / "study" / "config.json"
    settings.unlink()
    assert f"{settings} is missing" in command(*report, tmp_path / "page").sentence

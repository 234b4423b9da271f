"""Several runs on one page: row names, common text windows, and warnings about the rest."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from cli.conftest import Command
from normattn.atomic import write_json
from normattn.cli.reporting import of_runs
from normattn.cli.telling_apart import GatheredRun, told_apart
from normattn.errors import InputError
from normattn.lab.report.view import View
from normattn.lab.stats import Identity, MeasurementStore, identified, sums
from normattn.lab.studies.reading import PAGE
from normattn.structured import read_object


def read(
    seed: int = 0, units: int = 3, end: int = 16, tokens: float = 8.0, **changes: Any
) -> pl.DataFrame:
    """What an evaluation of a run leaves: the loss and accuracy of a few documents."""
    fields: dict[str, Any] = {"row": "KNA", "score": "KNA@8", "protocol": "last_segment"}
    fields |= {"length": 16, "train_length": 8, "data": "d", **changes}
    names = [f"document {n}" for n in range(units)]
    edges = [0.0, *(2.0**power for power in range(3, end.bit_length()))]
    counts = [[4.0] * (len(edges) - 1)] * units, [[tokens] * (len(edges) - 1)] * units
    rows = [sums(name, names, *counts, axis="position", edges=edges) for name in _READ]
    return identified(Identity(study="", seed=seed, **fields), rows)


_READ = ("loss", "accuracy", "accuracy_seen")


def copied(trained: Path, place: Path, *frames: pl.DataFrame, **settings: Any) -> Path:
    """The trained run with other settings and records."""
    shutil.copytree(trained, place, ignore=shutil.ignore_patterns("evaluations", "model"))
    whole = read_object(place / "config.json")
    for name, value in settings.items():
        group, _, field = name.rpartition("__")
        (whole["config"][group] if group else whole["config"])[field] = value
    write_json(place / "config.json", whole)
    for number, frame in enumerate(frames):
        MeasurementStore(place / "evaluations").put(f"{number:032}", frame)
    return place


def test_runs_of_other_settings_have_rows_of_their_own(trained: Path, tmp_path: Path) -> None:
    alike = [copied(trained, tmp_path / f"s{n}", read(n), seed=n, threads=n + 1) for n in (0, 1)]
    assert of_runs(alike)["row"].unique().to_list() == ["KNA"]
    wider = copied(trained, tmp_path / "w", read(2), seed=2, steps=5, model__dim=32)
    rows = of_runs([*alike, wider])["row"].unique().sort().to_list()
    assert rows == ["KNA (steps 4, model.dim 16)", "KNA (steps 5, model.dim 32)"]


def test_too_many_other_settings_are_refused(trained: Path, tmp_path: Path) -> None:
    other = {"steps": 5, "batch_size": 8, "clip": 2.0, "model__dim": 32, "model__layers": 2}
    runs = [copied(trained, tmp_path / "a", read()), copied(trained, tmp_path / "b", **other)]
    with pytest.raises(InputError, match=r"both hold KNA, .* 5 other settings \(steps is 4 in"):
        of_runs(runs)


def test_what_only_one_run_has_tells_it_too() -> None:
    """An optimiser by its name, and a run that was continued from one that was not."""
    settings = (
        {"optimiser.name": "adamw", "optimiser.eps": "1e-08"},
        {"optimiser.name": "muon", "optimiser.momentum": "0.9"},
    )
    runs = [GatheredRun(Path("a"), read(), {}, each) for each in settings]
    named = [rows["row"][0] for rows in told_apart(runs)]
    assert named == ["KNA (optimiser.name adamw)", "KNA (optimiser.name muon)"]
    continued = GatheredRun(Path("b"), read(1), {"continued": "ABF"}, settings[0])
    named = [rows["row"][0] for rows in told_apart([runs[0], continued])]
    assert named == ["KNA", "KNA (continued ABF)"]


def test_two_addresses_may_name_one_text() -> None:
    def names(*texts: str) -> set[str]:
        addresses = (f"/{place}/corpus" for place in range(len(texts)))
        runs = [
            GatheredRun(Path(text), read(), {}, {"data.corpus": address}, frozenset({text}))
            for text, address in zip(texts, addresses, strict=True)
        ]
        return {rows["row"][0] for rows in told_apart(runs)}

    assert names("a", "a") == {"KNA"}
    assert names("a", "b") == {"KNA (data.corpus /0/corpus)", "KNA (data.corpus /1/corpus)"}


@pytest.mark.parametrize("again", [{"data": "e"}, {"length": 32, "tokens": 4.0}])
def test_last_segments_of_two_evaluations_are_no_change(
    trained: Path, tmp_path: Path, again: dict[str, Any]
) -> None:
    run = copied(trained, tmp_path / "run", read(), read(**again))
    with pytest.raises(InputError, match=r"evaluated several times, .* segments of KNA are not"):
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


def test_a_training_is_given_once(trained: Path, tmp_path: Path) -> None:
    runs = [copied(trained, tmp_path / name, read()) for name in "ab"]
    with pytest.raises(InputError, match=r"a and .*b both hold KNA seed 0, trained alike"):
        of_runs(runs)


def test_what_is_left_out_is_told(command: Command, trained: Path, tmp_path: Path) -> None:
    natural: dict[str, Any] = {"protocol": "non_repeated", "data": "m"}
    runs = [copied(trained, tmp_path / str(n), read(n, **natural), seed=n) for n in (0, 1)]
    part = copied(trained, tmp_path / "part", read(2), read(2, **natural | {"data": "z"}), seed=2)
    said = command("report", *runs, part, "--out", tmp_path / "page")
    assert said.code == 0
    assert f"{part}: left out" in said.sentence
    assert said.sentence.endswith("KNA (non_repeated at length 16)")
    none = copied(trained, tmp_path / "none", read(3, **natural | {"data": "z"}), seed=3)
    refused = command("report", *runs, none, "--out", tmp_path / "none-page")
    assert refused.code == 2
    assert f"{none} was evaluated on different text windows" in refused.sentence


def test_rows_read_to_other_lengths_by_position() -> None:
    """A row has the octaves that it was read through."""
    rows = [
        read(row=name, score=name, protocol="by_position", length=end, end=end)
        for name, end in (("short", 16), ("long", 64))
    ]
    view = View(pl.concat(rows))
    table = next(table for table in PAGE.tables if table.key == "accuracy_by_position").fill(view)
    titles = [column.title for column in table.columns]
    assert titles[-4:] == ["1 to 8", "9 to 16", "17 to 32", "33 to 64"]
    cells = zip(table.rows, table.cells, strict=True)
    shown = {row.label: [cell.text for cell in line][-4:] for row, line in cells}
    assert shown["short"][2:] == ["–", "–"]
    assert "–" not in [*shown["short"][:2], *shown["long"]]

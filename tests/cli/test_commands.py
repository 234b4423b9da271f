"""What each command does when all is well."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import normattn
from normattn.cli import parsing
from normattn.cli.app import COMMANDS
from normattn.lab import studies
from normattn.settings import format_setting
from studies.conftest import Command
from studies.test_sweep import rows


@pytest.mark.parametrize(
    "arguments",
    [(), *((name,) for name in COMMANDS), *(("reproduce", study) for study in studies.names())],
)
def test_help_teaches_by_examples(command: Command, arguments: tuple[str, ...]) -> None:
    said = command.done(*arguments, "--help")
    assert "Examples" in said.out
    assert " ".join(("normattn", *arguments)) in said.out
    assert "_cell" not in said.out


def test_a_tilde_behind_an_equals_sign_is_home(
    command: Command, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell expands `--out ~/run`, but not `--out=~/run`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "settings.toml").write_text("steps = 2\n")
    command.done("train", "~/settings.toml", "--preset", tiny, "--out=~/run")
    assert sorted(path.name for path in tmp_path.glob("*run*")) == ["run"]
    assert not (tmp_path / "~").exists()
    command.done("export", "~/run", "~/saved")
    assert (tmp_path / "saved").is_dir()


def test_a_plan_says_what_a_corpus_needs(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command("--version").out.strip() == normattn.__version__
    corpus = "python-packages-2026"
    for words in (("train", "--corpus", corpus), ("reproduce", "keynorm", "--preset=workstation")):
        said = command.done(*words, "--plan")
        assert re.match(rf"the corpus {corpus} is \d+ pinned packages, .*MB", said.out)
    monkeypatch.setitem(sys.modules, "datasets", None)
    said = command("train", "--plan", "--corpus", "hf:me/data")
    assert (said.code, said.out) == (2, "")
    assert "datasets" in said.err


def test_a_short_run_warms_up_for_its_share(command: Command, tmp_path: Path) -> None:
    place = ("--out", tmp_path / "run", "--plan")
    said = command.done("train", "--steps", 45, *place)
    assert "parameters" in said.out
    assert "FLOPs" in said.out
    assert not (tmp_path / "run").exists()
    late = ("train", "--steps", 45, "--set", "schedule.warmup_steps=50")
    assert "warmup_steps is 50" in command(*late, *place).sentence


def test_train_evaluate_report(command: Command, trained: Path, run: Path, tmp_path: Path) -> None:
    files = {path.name for path in trained.iterdir()}
    assert {"config.json", "metrics.jsonl", "model", "status.json", "tokeniser.json"} <= files
    said = command.done("evaluate", run, "--methods", "unmodified,YaRN", "--multiples", "1,4")
    assert "KNA-YaRN" in said.out
    assert len(list(run.glob("evaluations/*.parquet"))) == 2 * 5
    out = tmp_path / "report"
    command.done("report", run, "--out", out)
    table = rows(out)
    assert [row["row"] for row in table] == ["KNA", "KNA-YaRN"]
    assert {"value", "low", "high", "units", "seeds"} <= table[1]["non_repeated"].keys()
    measured = pl.read_parquet(out / "measurements.parquet")
    assert measured.filter(protocol="non_repeated")["length"].unique().to_list() == [32]
    assert "held-out text (32)" in (out / "table.md").read_text()
    with (out / "table.csv").open() as file:
        found = list(csv.DictReader(file))
    assert [row["row"] for row in found] == ["KNA", "KNA-YaRN"]
    assert float(found[1]["non_repeated"]) == table[1]["non_repeated"]["value"]
    assert {path.name for path in (out / "figures").iterdir()} == {
        *("accuracy_by_position_non_repeated.png", "accuracy_by_position_repeated.png"),
        *("accuracy_by_length.png", "training_loss.png"),
    }


def test_a_page_among_its_runs_does_not_stand_for_them(command: Command, run: Path) -> None:
    """What was measured since is on the next page, and no page is measured itself."""
    evaluate = ("evaluate", run, "--protocols", "train-length", "--multiples", "1,2", "--methods")
    for method, expected in (("unmodified", ["KNA"]), ("YaRN", ["KNA", "KNA-YaRN"])):
        command.done(*evaluate, method)
        for words in ((run,), (run, "--out", run / "page"), (run.parent,)):
            command.done("report", *words)
        for out in (run, run / "page", run.parent):
            assert [row["row"] for row in rows(out)] == expected


def test_a_run_and_its_twin(command: Command, tiny: Path, trained: Path, tmp_path: Path) -> None:
    """The run is not trained again; its config.json trains its twin."""
    before = (trained / "model" / "model.safetensors").stat().st_mtime_ns
    command.done("train", "--preset", tiny, "--score", "KNA", "--out", trained)
    assert (trained / "model" / "model.safetensors").stat().st_mtime_ns == before
    config = trained / "config.json"
    command.done("train", config, "--preset", tiny, "--out", tmp_path / "twin")
    for name in ("config.json", "metrics.jsonl", "model/model.safetensors"):
        assert (tmp_path / "twin" / name).read_bytes() == (trained / name).read_bytes()


def test_options_reach_the_settings(command: Command, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("steps = 3\nclip = 0.5\n[optimiser]\nlr = 0.5\n")
    given = ("--optimiser", "tiger", "--length=12", "--set", "model.norm_gain=false", "--steps=2")
    out = tmp_path / "run"
    command.done("train", tmp_path / "own.toml", "--preset", tiny, "--out", out, *given)
    config = json.loads((out / "config.json").read_text())["config"]
    assert (config["steps"], config["clip"], config["batch_size"]) == (2, 0.5, 4)
    assert (config["optimiser"]["name"], config["optimiser"]["lr"]) == ("tiger", 0.5)
    assert (config["model"]["train_length"], config["model"]["norm_gain"]) == (12, False)


@pytest.mark.parametrize(("preset", "block"), [("laptop", "gau"), ("workstation", "mha")])
def test_another_block_is_enough(command: Command, tmp_path: Path, preset: str, block: str) -> None:
    """What the preset says of its own block does not stand in the way of another."""
    asked = ("train", "--preset", preset, "--plan", "--out", tmp_path)
    command.done(*asked, "--set", f"model.block={block}")
    refused = command(*asked, "--set", "model.block=gau", "--heads", "4")
    assert "has one head" in refused.sentence


def test_assignments() -> None:
    values = {"1": 1, "1e-3": 1e-3, "true": True, "[1, 2]": [1, 2], "bf16": "bf16"}
    values |= {"none": None, "'none'": "none", "a b": "a b"}
    for text, value in values.items():
        assert parsing.assignments([f"a.b={text}"]) == {"a.b": value}


WHOLE = st.integers(-(1 << 63), (1 << 63) - 1)
REAL = st.floats(allow_nan=False, allow_infinity=False)
WITHOUT_NONE = st.booleans() | WHOLE | REAL | st.text()


@settings(max_examples=40, deadline=None)
@given(st.none() | WITHOUT_NONE | st.lists(WITHOUT_NONE | st.lists(WITHOUT_NONE), max_size=4))
def test_a_setting_is_typed_as_it_is_read(value: Any) -> None:
    assert parsing.assignments(format_setting("a.b", value)) == {"a.b": value}

"""`normattn evaluate` and `report` with retrieval, reading by position and every method."""

from __future__ import annotations

import csv
from pathlib import Path

import polars as pl

from cli.conftest import Command
from normattn.lab.data.retrieval import TASKS
from normattn.lab.studies.methods import explain_unsupported, inference_time_methods
from normattn.score import ScoreSpec


def records(run: Path) -> dict[str, int]:
    """Each record's name and when it was written."""
    return {path.name: path.stat().st_mtime_ns for path in run.glob("evaluations/*.parquet")}


def test_retrieval_and_reading_on(command: Command, run: Path, tmp_path: Path) -> None:
    arguments = ("evaluate", run, "--protocols", "retrieval,by-position", "--max-windows", 5)
    said = command.done(*arguments, "--multiples", "8,16", "--methods", "as is,ReRoPE")
    for expected in (
        "KNA-ReRoPE",
        "by position, 128 tokens",
        "multi_key",
        "In short",
        str(run / "report"),
    ):
        assert expected in said.out
    first = records(run)
    assert len(first) == 2 * (1 + len(TASKS) * 2)
    again = command(*arguments, "--multiples", "8,16", "--methods", "as is,ReRoPE")
    assert again.out == said.out
    assert (run / "report" / "table.md").exists()
    assert records(run) == first
    # Another length in the middle asks nothing again that was asked as it is, nor at the longest.
    command.done(*arguments, "--multiples", "8,12,16", "--methods", "as is,ReRoPE")
    assert first.items() <= records(run).items()
    assert len(records(run)) == 2 * (1 + len(TASKS) * 3)

    out = tmp_path / "report"
    command.done("report", run, "--out", out)
    page = (out / "table.md").read_text()
    for heading in ("Accuracy by position", "Loss by position", "Facts inserted into a long text"):
        assert f"## {heading}" in page
    for name in ("accuracy_by_position", "loss_by_position", "retrieval"):
        with (out / f"{name}.csv").open() as file:
            lines = list(csv.DictReader(file))
        assert [line["row"] for line in lines] == ["KNA", "KNA-ReRoPE"], name
    for line in lines:
        for task in TASKS:
            for name in (
                f"{task}_{what}_{n}" for what in ("exact", "token") for n in (64, 96, 128)
            ):
                assert 0 <= float(line[name]) <= 100
                # One sample, a fifth of --max-windows, has no interval.
                assert line[f"{name}_low"] == line[f"{name}_high"] == ""
    # What no table shows, the depths of every task and length, is in the frame.
    asked = pl.read_parquet(out / "measurements.parquet").filter(
        protocol="retrieval", statistic="exact"
    )
    cells = asked.select("method", "factor.task", "length", "bin").unique()
    assert cells.height == 2 * len(TASKS) * 3 * 5
    names = {path.name for path in (out / "figures").iterdir()}
    assert names >= {"reading_by_position_KNA.png", *(f"retrieval_{task}.png" for task in TASKS)}


def test_every_method(command: Command, run: Path) -> None:
    arguments = ("--protocols", "by-position", "--multiples", "1,4", "--max-windows", 1)
    said = command.done("evaluate", run, *arguments, "--methods", "all,YaRN(factor=2)")
    spec = ScoreSpec.parse("KNA", train_length=8)
    methods = inference_time_methods(spec, 4.0)
    assert "ReRoPE-logn+" in methods
    assert len(records(run)) == 1 + len(methods) + 1
    for sentence in explain_unsupported(spec, 4.0):
        assert sentence in said.out

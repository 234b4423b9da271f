"""Whole sweeps as a user runs them: killed, resumed, widened, refused."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from normattn.lab.runs import RunDirectory
from studies import small
from studies.conftest import FINISHED, Command, Start

ROWS = ("--variants", "Baseline,KNA-logn", "--methods", "unmodified,YaRN")
SECONDS = 300  # far beyond what it takes alone: speed is not tested here


def wait_until(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


def wait_for_training(out: Path, steps: int) -> None:
    def trained() -> bool:
        notes = [json.loads(path.read_text()) for path in out.glob("jobs/*/*/progress.json")]
        return any(note["phase"] == "training" and note["done"] >= steps for note in notes)

    wait_until(trained)


def result(out: Path) -> dict[str, bytes]:
    names = ["table.md", "table.csv", "table.json", "report.html", "measurements.parquet"]
    files = [out / name for name in names] + sorted((out / "figures").glob("*"))
    assert len(files) >= 6
    return {file.name: file.read_bytes() for file in files}


def rows(out: Path) -> list[dict[str, Any]]:
    found = json.loads((out / "table.json").read_text())["tables"]["table"]
    assert isinstance(found, list)
    return found


def written(out: Path) -> dict[Path, int]:
    """When what was trained and what was measured was written."""
    kinds = (".parquet", ".safetensors", ".jsonl")
    files = [path for path in (out / "cells").rglob("*") if path.suffix in kinds]
    return {path: path.stat().st_mtime_ns for path in files}


def test_killed_midway_the_table_is_the_same(tiny: Path, tmp_path: Path, start: Start) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    sweep = ("reproduce", "keynorm", "--preset", tiny, *ROWS, "--set", "training.steps=1000")
    ended = start(*sweep, "--out", whole, cells_here=True).end()
    assert ended.code == 0, ended.err
    for row in rows(whole):
        # Said as soon as its cell ended, and of one seed the same as the table says.
        said = f"  {row['row']}: at the training length {row['train']['value']:.1f}, "
        assert said in ended.out + ended.err

    # First the parent alone is killed. Its child saves and stops; held still for a while, it is
    # there when the same command comes again, which waits for it and says so.
    process = start(*sweep, "--out", broken, "--jobs", 1)
    wait_for_training(broken, steps=1)
    (orphan,) = psutil.Process(process.pid).children()
    orphan.suspend()
    process.send(signal.SIGKILL)
    process = start(*sweep, "--out", broken, cells_here=True)
    wait_until(lambda: "normattn: waiting for process " in process.complained())
    for path in broken.glob("jobs/*/*/progress.json"):
        path.unlink()
    orphan.resume()
    _, alive = psutil.wait_procs([orphan], SECONDS)
    assert not alive
    # Then everything at once, as when the power goes: the cells are in this process.
    wait_for_training(broken, steps=50)
    process.send(signal.SIGKILL)
    assert not (broken / "table.json").exists()

    ended = start(*sweep, "--out", broken, cells_here=True).end()
    assert ended.code == 0, ended.err
    assert result(broken) == result(whole)
    for cell in ("Baseline", "KNA-logn"):
        metrics = f"cells/{cell}/seed0/metrics.jsonl"
        assert (broken / metrics).read_bytes() == (whole / metrics).read_bytes()


@pytest.mark.usefixtures("runs_here")
def test_refused_or_widened(
    tiny: Path, finished: Path, tmp_path: Path, start: Start, command: Command
) -> None:
    out = Path(shutil.copytree(finished, tmp_path / "out"))
    sweep = ("reproduce", "keynorm", "--preset", tiny, "--out", out)
    with RunDirectory.existing(out).lock():
        ended = start(*sweep, *FINISHED).end()
    assert ended.code == 2
    assert "is in use by process" in ended.err
    refused = command(*sweep, "--set", "training.steps=6").last
    assert "training.steps is 2 there and 6 here" in refused

    steps, before = ("--set", "training.steps=2"), written(out)
    command.done(*sweep, *steps, "--variants", "KNA,QNA", "--methods", "NTK", "--seeds", 2)
    # Done is done: nothing is trained or evaluated again.
    assert before.items() <= written(out).items()
    assert [row["row"] for row in rows(out)] == ["QNA-NTK", "KNA", "KNA-NTK", "KNA-YaRN"]
    assert [row["non_repeated"]["seeds"] for row in rows(out)] == [[0, 1], [0], [0, 1], [0]]
    typed = "normattn reproduce keynorm --preset ./tiny.toml --set training.steps=2 --variants"
    both = f"{typed} KNA --methods unmodified,YaRN && {typed} KNA,QNA --methods NTK --seeds 2"
    assert f"`{both}`" in (out / "table.md").read_text()

    # A cell that fails is named, and the others are done.
    (out / "cells" / "CosA" / "seed0").mkdir(parents=True)
    (out / "cells" / "CosA" / "seed0" / "notes.txt").write_text("not ours")
    failed = command(*sweep, *steps, "--variants", "CosA,Baseline", "--methods", "unmodified")
    assert failed.code == 2
    assert "CosA seed 0 failed: " in failed.err
    assert "notes.txt" in failed.err
    assert "Traceback" not in failed.err
    found = [row["row"] for row in rows(out)]
    assert found == ["Baseline", "QNA-NTK", "KNA", "KNA-NTK", "KNA-YaRN"]


@pytest.mark.usefixtures("runs_here")
def test_divergence_counts(tiny: Path, tmp_path: Path, command: Command) -> None:
    """Of rows of a table, and of a grid."""
    # Tiger's steps are relative: at this rate every weight grows tenfold a step.
    poison = ("training.optimiser.name=tiger", "training.optimiser.lr=10", "training.steps=60")
    rows = ('sizes.small.rows=["PostLN"]', "sizes.large.rows=[]")
    grid = ("grid.rates=[1e-3, 10.0]", "grid.steps=60")
    changes = [word for setting in (*poison, *rows, *grid) for word in ("--set", setting)]
    preset, out = small.preset("realformer", tiny, tmp_path), tmp_path / "out"
    sweep = ("reproduce", "realformer", "--preset", preset, *changes, "--out", out)
    assert "diverged" in command.done(*sweep).err
    assert "PostLN, size small, seed 0: diverged at step" in (out / "table.md").read_text()
    found = json.loads((out / "table.json").read_text())["tables"]["grid"]
    assert [(row["warmup"], row["learning_rate"], row["loss"] is None) for row in found] == [
        *(("1", "0.001", False), ("1", "10", True)),
        *(("0", "0.001", False), ("0", "10", True)),
    ]
    assert [row["state"] for row in found][1::2] == ["diverged", "diverged"]
    made = {path: path.read_bytes() for path in out.glob("table.*")}
    command.done(*sweep)
    assert {path: path.read_bytes() for path in out.glob("table.*")} == made

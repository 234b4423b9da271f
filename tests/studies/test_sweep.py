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

import apart
from normattn.lab.runs import RunDirectory
from studies.conftest import FINISHED, Start, run

ROWS = ("--variants", "Baseline,KNA-logn", "--methods", "unmodified,YaRN")
SECONDS = 300  # far beyond what it takes alone: speed is not tested here


def finish(process: apart.Program) -> tuple[int, str]:
    ended = process.end()
    return ended.code, ended.out + ended.err


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
    files = [
        path for kind in ("parquet", "safetensors", "jsonl") for path in out.rglob(f"*.{kind}")
    ]
    return {path: path.stat().st_mtime_ns for path in files if path.is_relative_to(out / "cells")}


def test_killed_in_the_middle_the_table_is_the_same(
    tiny: Path, tmp_path: Path, start: Start
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    sweep = ("reproduce", "keynorm", "--preset", tiny, *ROWS, "--set", "training.steps=1000")
    code, said = finish(start(*sweep, "--out", whole, cells_here=True))
    assert code == 0, said
    for row in rows(whole):
        # Said as soon as its cell ended, and of one seed the same as the table says.
        assert f"  {row['row']}: at the training length {row['train']['value']:.1f}, " in said

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

    code, said = finish(start(*sweep, "--out", broken, cells_here=True))
    assert code == 0, said
    assert result(broken) == result(whole)
    for cell in ("Baseline", "KNA-logn"):
        metrics = f"cells/{cell}/seed0/metrics.jsonl"
        assert (broken / metrics).read_bytes() == (whole / metrics).read_bytes()


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "out"))


@pytest.mark.usefixtures("runs_here")
def test_refused_and_widened(
    tiny: Path, out: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*words: object) -> tuple[int, str]:
        code = run("reproduce", "keynorm", "--preset", tiny, *words, "--out", out)
        return code, capsys.readouterr().err

    with RunDirectory.existing(out).lock():
        code, said = finish(
            start("reproduce", "keynorm", "--preset", tiny, *FINISHED, "--out", out)
        )
    assert code == 2
    assert "is in use by process" in said
    code, said = ask("--set", "training.steps=6")
    assert code == 2
    assert "training.steps is 2 there and 6 here" in said

    steps, before = ("--set", "training.steps=2"), written(out)
    code, said = ask(*steps, "--variants", "KNA,QNA", "--methods", "NTK", "--seeds", 2)
    assert code == 0, said
    # Done is done: nothing is trained or evaluated again.
    assert before.items() <= written(out).items()
    assert [row["row"] for row in rows(out)] == ["QNA-NTK", "KNA", "KNA-NTK", "KNA-YaRN"]
    assert [row["non_repeated"]["seeds"] for row in rows(out)] == [[0, 1], [0], [0, 1], [0]]
    command = "normattn reproduce keynorm --preset ./tiny.toml --set training.steps=2"
    first, second = (
        "--variants KNA --methods unmodified,YaRN",
        "--variants KNA,QNA --methods NTK --seeds 2",
    )
    assert f"`{command} {first} && {command} {second}`" in (out / "table.md").read_text()

    # A cell that fails is named, and the others are done.
    (out / "cells" / "CosA" / "seed0").mkdir(parents=True)
    (out / "cells" / "CosA" / "seed0" / "notes.txt").write_text("not ours")
    code, said = ask(*steps, "--variants", "CosA,Baseline", "--methods", "unmodified")
    assert code == 2
    assert "CosA seed 0 failed: " in said
    assert "notes.txt" in said
    assert "Traceback" not in said
    found = [row["row"] for row in rows(out)]
    assert found == ["Baseline", "QNA-NTK", "KNA", "KNA-NTK", "KNA-YaRN"]


@pytest.mark.usefixtures("runs_here")
def test_a_diverged_cell_is_a_result(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Tiger's steps are relative: at this rate every weight grows tenfold a step.
    poison = ("training.optimiser.name=tiger", "training.optimiser.lr=10")
    changes = [word for setting in poison for word in ("--set", setting)]
    out = tmp_path / "out"
    sweep = ("reproduce", "keynorm", "--preset", tiny, *changes, "--out", out, *ROWS)
    assert run(*sweep) == 0
    assert "diverged" in "".join(capsys.readouterr())
    page = (out / "table.md").read_text()
    assert {row["row"] for row in rows(out)} == {"Baseline", "KNA-logn"}
    for name in ("Baseline", "KNA-logn"):
        assert f"{name}, seed 0: diverged at step" in page
    first = result(out)
    assert run(*sweep) == 0
    assert result(out) == first

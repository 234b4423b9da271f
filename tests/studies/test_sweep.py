"""Whole sweeps as a user runs them: killed, resumed, widened, refused."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

import apart
from studies.conftest import Start

ROWS = ("--variants", "Baseline,KNA-logn", "--methods", "unmodified,YaRN")
SECONDS = 300  # far beyond what it takes alone: speed is not tested here


def finish(process: apart.Program) -> tuple[int, str]:
    ended = process.end()
    return ended.code, ended.out + ended.err


def wait_until(found: Callable[[], Any]) -> Any:
    """What `found` returns once it is true."""
    deadline = time.monotonic() + SECONDS
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


def wait_for_training(out: Path, steps: int) -> None:
    """Until a cell in `out` has trained for `steps` steps in all."""

    def trained() -> bool:
        notes = [json.loads(path.read_text()) for path in out.glob("jobs/*/*/progress.json")]
        return any(note["phase"] == "training" and note["done"] >= steps for note in notes)

    wait_until(trained)


def forget_progress(out: Path) -> None:
    """Drop the notes of earlier children, so that those of new ones can be waited for."""
    for path in out.glob("jobs/*/*/progress.json"):
        path.unlink()


def result(out: Path) -> dict[str, bytes]:
    """Every file that a reader gets."""
    names = ["table.md", "table.csv", "table.json", "report.html", "measurements.parquet"]
    files = [out / name for name in names] + sorted((out / "figures").glob("*"))
    assert len(files) >= 6
    return {file.name: file.read_bytes() for file in files}


def rows(out: Path) -> list[dict[str, Any]]:
    found = json.loads((out / "table.json").read_text())["tables"]["table"]
    assert isinstance(found, list)
    return found


def written(out: Path) -> dict[Path, int]:
    """When each file of a run or of an evaluation was written."""
    return {path: path.stat().st_mtime_ns for path in out.glob("cells/**/*.*") if path.is_file()}


def test_killed_in_the_middle_the_table_is_the_same(
    tiny: Path, tmp_path: Path, start: Start
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    sweep = ("reproduce", "keynorm", "--preset", tiny, *ROWS)
    code, said = finish(start(*sweep, "--out", whole, "--jobs", 1, cells_here=True))
    assert code == 0, said
    for row in rows(whole):
        # Said as soon as its cell ended, and of one seed the same as the table says.
        assert f"  {row['row']}: at the training length {row['train']['value']:.1f}, " in said

    # First the parent alone is killed. Its children save and stop; held still for a while, they are
    # there when the same command comes again, which waits for them and says so.
    process = start(*sweep, "--out", broken, "--jobs", 1)
    wait_for_training(broken, steps=1)
    orphans = psutil.Process(process.pid).children()
    for orphan in orphans:
        orphan.suspend()
    process.send(signal.SIGKILL)
    forget_progress(broken)
    process = start(*sweep, "--out", broken, "--jobs", 1)
    wait_until(lambda: "normattn: waiting for process " in process.complained())
    for orphan in orphans:
        orphan.resume()
    _, alive = psutil.wait_procs(orphans, SECONDS)
    assert not alive
    forget_progress(broken)
    # Then everything at once, as when the power goes.
    wait_for_training(broken, steps=100)
    for child in psutil.Process(process.pid).children():
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.send(signal.SIGKILL)
    assert not (broken / "table.json").exists()

    code, said = finish(start(*sweep, "--out", broken, cells_here=True))
    assert code == 0, said
    assert result(broken) == result(whole)
    for cell in ("Baseline", "KNA-logn"):
        metrics = Path("cells") / cell / "seed0" / "metrics.jsonl"
        assert (broken / metrics).read_bytes() == (whole / metrics).read_bytes()

    # Done is done: nothing is trained or evaluated again, and the table stays.
    before = written(broken)
    code, said = finish(start(*sweep, "--out", broken, cells_here=True))
    assert code == 0, said
    assert written(broken) == before
    assert result(broken) == result(whole)


def test_refused_and_widened(tiny: Path, tmp_path: Path, start: Start) -> None:
    out = tmp_path / "out"
    sweep = ("reproduce", "keynorm", "--preset", tiny, "--set", "training.steps=5", "--out", out)
    process = start(*sweep, "--variants", "KNA", "--methods", "unmodified", cells_here=True)
    wait_until((out / "jobs").exists)
    process.send(signal.SIGSTOP)  # So that it cannot be done before the other one looks.
    code, said = finish(start(*sweep, "--variants", "KNA"))
    process.send(signal.SIGCONT)
    assert code == 2
    assert "is in use by process" in said
    code, said = finish(process)
    assert code == 0, said
    assert [row["row"] for row in rows(out)] == ["KNA"]

    code, said = finish(start(*sweep[:-4], "--set", "training.steps=6", "--out", out))
    assert code == 2
    assert "training.steps is 5 there and 6 here" in said

    wider = ("--variants", "KNA,QNA", "--methods", "NTK", "--seeds", 2)
    code, said = finish(start(*sweep, *wider, cells_here=True))
    assert code == 0, said
    assert [row["row"] for row in rows(out)] == ["QNA-NTK", "KNA", "KNA-NTK"]
    assert [row["non_repeated"]["seeds"] for row in rows(out)] == [[0, 1], [0], [0, 1]]
    command = "normattn reproduce keynorm --preset ./tiny.toml --set training.steps=5"
    first, second = (
        "--variants KNA --methods unmodified",
        "--variants KNA,QNA --methods NTK --seeds 2",
    )
    assert f"`{command} {first} && {command} {second}`" in (out / "table.md").read_text()


def test_a_diverged_cell_is_a_result(tiny: Path, tmp_path: Path, start: Start) -> None:
    out = tmp_path / "out"
    # Tiger's steps are relative: at this rate every weight grows tenfold a step.
    poison = ("training.optimiser.name=tiger", "training.optimiser.lr=10")
    changes = [word for setting in poison for word in ("--set", setting)]
    sweep = ("reproduce", "keynorm", "--preset", tiny, *changes, "--out", out, *ROWS)
    code, said = finish(start(*sweep, cells_here=True))
    assert code == 0, said
    assert "diverged" in said
    page = (out / "table.md").read_text()
    assert {row["row"] for row in rows(out)} == {"Baseline", "KNA-logn"}
    for name in ("Baseline", "KNA-logn"):
        assert f"{name}, seed 0: diverged at step" in page
    first = result(out)
    code, said = finish(start(*sweep))
    assert code == 0, said
    assert result(out) == first


def test_a_failed_cell_is_named_and_the_others_are_done(
    tiny: Path, tmp_path: Path, start: Start
) -> None:
    out = tmp_path / "out"
    sweep = ("reproduce", "keynorm", "--preset", tiny, "--set", "training.steps=5", "--out", out)
    done = start(*sweep, "--variants", "KNA", "--methods", "unmodified", cells_here=True)
    assert finish(done)[0] == 0
    (out / "cells" / "QNA" / "seed0").mkdir(parents=True)
    (out / "cells" / "QNA" / "seed0" / "notes.txt").write_text("not ours")
    others = ("--variants", "QNA,Baseline", "--methods", "unmodified")
    code, said = finish(start(*sweep, *others, cells_here=True))
    assert code == 2
    assert "QNA seed 0 failed: " in said
    assert "notes.txt" in said
    assert "Traceback" not in said
    assert [row["row"] for row in rows(out)] == ["Baseline", "KNA"]

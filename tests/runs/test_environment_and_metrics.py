"""What a run ran on, its lines of metrics, and interleaved timing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from normattn.errors import InputError
from normattn.lab.runs import MetricsLog, read_metrics, record_environment
from normattn.lab.runs.timing import Timing, interleave


def test_only_a_change_is_reported_and_each_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "environment.json"
    assert record_environment(path, {"torch": "1", "threads": 1}, 0) == []
    assert record_environment(path, {"torch": "1", "threads": 1}, 5) == []
    assert record_environment(path, {"torch": "2", "threads": 1}, 7) == ["torch 1 → 2"]
    assert record_environment(path, {"torch": "2", "threads": 1}, 8) == []
    assert record_environment(path, {"torch": "2", "threads": 4}, 9) == ["threads 1 → 4"]
    stored = json.loads(path.read_text())
    assert stored["started"] == {"torch": "1", "threads": 1}
    assert [entry["step"] for entry in stored["resumed"]] == [7, 9]


def write(path: Path, steps: int) -> None:
    log = MetricsLog(path)
    for step in range(1, steps + 1):
        log.append({"step": step, "loss": 1.0 / step})
    log.close()


@pytest.mark.parametrize("torn", ["", '{"step": 5, "lo', '{"step": 5}'])
def test_truncation_then_appending_gives_an_unbroken_file(tmp_path: Path, torn: str) -> None:
    write(tmp_path / "whole", 6)
    write(tmp_path / "m", 4)
    with (tmp_path / "m").open("a") as file:
        file.write(torn)
    assert read_metrics(tmp_path / "m") == [{"step": n, "loss": 1.0 / n} for n in (1, 2, 3, 4)]
    log = MetricsLog(tmp_path / "m")
    assert log.truncate_after(3) == 3
    for step in (4, 5, 6):
        log.append({"step": step, "loss": 1.0 / step})
    log.flush()
    assert len(read_metrics(tmp_path / "m")) == log.lines == 6
    log.close()
    assert (tmp_path / "m").read_bytes() == (tmp_path / "whole").read_bytes()


def test_no_file_is_no_lines_and_a_damaged_line_is_named(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "m") == []
    assert MetricsLog(tmp_path / "m").truncate_after(4) == 0
    with pytest.raises(ValueError, match="JSON"):
        MetricsLog(tmp_path / "nan").append({"step": 1, "loss": float("nan")})
    (tmp_path / "m").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    for read in (read_metrics, lambda path: MetricsLog(path).truncate_after(3)):
        with pytest.raises(InputError, match="line 2"):
            read(tmp_path / "m")


def test_every_entry_is_timed_once_a_round_in_changing_order() -> None:
    said: list[str] = []
    entries = {name: (lambda name=name: said.append(name)) for name in "abc"}
    timings = interleave(entries, 5, warm=2, min_seconds=0.0)
    assert said[:6] == ["a", "a", "b", "b", "c", "c"]
    turns = [tuple(said[i : i + 3]) for i in range(6, len(said), 3)]
    assert len(turns) == 5
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len(set(turns)) > 1
    assert all(len(timing.rounds) == 5 and timing.calls == 1 for timing in timings.values())
    assert Timing((3.0, 1.0, 2.0)).median == 2.0
    # A quick one is called many times a sample.
    calls: list[int] = []
    timing = interleave({"a": lambda: calls.append(1)}, 2, warm=1, min_seconds=1e-3)["a"]
    assert timing.calls > 1
    assert len(calls) == 1 + 2 * timing.calls

from __future__ import annotations

from pathlib import Path

import pytest

from normattn.errors import InputError
from normattn.lab.runs import MetricsLog, read_metrics


def write(path: Path, steps: int) -> MetricsLog:
    log = MetricsLog(path)
    for step in range(1, steps + 1):
        log.append({"step": step, "loss": 1.0 / step})
    log.close()
    return log


def test_lines_come_back_exactly(tmp_path: Path) -> None:
    write(tmp_path / "m", 3)
    assert read_metrics(tmp_path / "m") == [
        {"step": step, "loss": 1.0 / step} for step in (1, 2, 3)
    ]


def test_no_file_is_no_lines(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "m") == []
    assert MetricsLog(tmp_path / "m").truncate_after(4) == 0


@pytest.mark.parametrize("torn", ["", '{"step": 5, "lo', '{"step": 5}'])
def test_truncation_then_appending_gives_an_unbroken_file(tmp_path: Path, torn: str) -> None:
    write(tmp_path / "whole", 6)
    write(tmp_path / "m", 4)
    with (tmp_path / "m").open("a") as file:
        file.write(torn)
    assert [record["step"] for record in read_metrics(tmp_path / "m")] == [1, 2, 3, 4]
    log = MetricsLog(tmp_path / "m")
    assert log.truncate_after(3) == 3
    for step in (4, 5, 6):
        log.append({"step": step, "loss": 1.0 / step})
    log.close()
    assert log.lines == 6
    assert (tmp_path / "m").read_bytes() == (tmp_path / "whole").read_bytes()


def test_flush_reaches_the_file(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "m")
    for step in (1, 2):
        log.append({"step": step})
    log.flush()
    assert len(read_metrics(tmp_path / "m")) == 2
    log.close()


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "m").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(InputError, match="line 2"):
        read_metrics(tmp_path / "m")
    with pytest.raises(InputError, match="line 2"):
        MetricsLog(tmp_path / "m").truncate_after(3)


def test_nan_never_enters_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        MetricsLog(tmp_path / "m").append({"step": 1, "loss": float("nan")})

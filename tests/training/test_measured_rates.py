"""Rates are measured once, kept, read again, and measured again where the file is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from normattn.lab.training import measured_rates
from normattn.lab.training.measured_rates import rates_here
from normattn.lab.training.roofline import Rates

from .rates import RATES, keep, rates_file


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where rates are kept, of a machine that is measured in no time."""
    monkeypatch.setenv("NORMATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(measured_rates, "measured_rates", lambda count: RATES)
    return rates_file()


def test_they_are_measured_once(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rates_here() == RATES
    assert "measuring" in capsys.readouterr().err
    assert file.exists()
    assert rates_here() == RATES
    assert capsys.readouterr().err == ""


def _without(name: str) -> dict[str, Any]:
    curves = {key: curve.points for key, curve in RATES.curves.items() if key != name}
    return {"curves": {key: {"points": points} for key, points in curves.items()}, "overhead": 1.0}


POINTS = {"points": [[1.0, 2.0], [1.0, 2.0]]}


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        (None, "the whole is no rate"),
        ({"curves": {"matrix, fp32": {"points": [[1.0, "x"]]}}, "overhead": 1.0}, "is no rate"),
        ({"curves": {"matrix, fp32": POINTS}, "overhead": 1.0}, "fp32 is no rate"),
        (_without("mixed, bf16"), "expected a curve of every kind of work"),
        ({**_without(""), "overhead": -1.0}, "overhead is no rate"),
    ],
)
def test_a_damaged_file_is_said_and_replaced(
    file: Path, capsys: pytest.CaptureFixture[str], rates: Any, said: str
) -> None:
    keep(file, rates)
    assert rates_here() == RATES
    warning, measuring = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: ")
    assert said in warning
    assert warning.endswith("; the rates are measured again")
    assert "measuring" in measuring
    assert rates_here() == RATES
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"machine": {"cpu": 1}, "rates": {}})])
def test_so_is_what_is_no_file_of_this_machine(
    file: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    file.write_text(content)
    assert rates_here() == RATES
    assert capsys.readouterr().err.startswith("warning: ")
    assert "rates" in json.loads(file.read_text())


def test_where_nothing_can_be_kept_they_are_measured_each_time(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.mkdir()
    (file / "there").touch()
    for _ in range(2):
        assert rates_here() == RATES
        assert "measuring" in capsys.readouterr().err


def test_this_machine_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than that there are rates, of every kind; how large they are, no test can say."""
    monkeypatch.setenv("NORMATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(measured_rates, "SECONDS", 0.0)
    measured = rates_here()
    assert measured.curves.keys() == RATES.curves.keys()
    assert 0 < measured.overhead < 1e-1
    assert isinstance(rates_here(), Rates)
    assert rates_here() == measured

"""A quick benchmark end to end: records, table, figure, resume, bad input. Nothing is timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.conftest import Command, Said
from cli.conftest import command as command
from normattn.bench import machine, measure, runner
from normattn.bench.case import Case
from normattn.bench.judge import roofline
from normattn.bench.measure import Measurement
from normattn.bench.settings import Settings
from normattn.bench.suites import SUITES
from normattn.errors import InputError
from normattn.lab.runs.timing import Timing


def hand_made(case: Case, slow: float = 3.0) -> Measurement:
    """Ours three times as slow and as large as the peers, to miss every goal."""
    ours = {goal.ours for goal in case.goals}
    values = {name: slow if name in ours else 1.0 for name in case.entries}
    return Measurement(
        {name: Timing((values[name],) * 9) for name in case.timed},
        {name: (values[name],) for name in case.asked("memory")},
        {name: (values[name],) for name in case.asked("first memory")},
        {"gemm_gflops": 100.0, "bandwidth_gb_per_s": 10.0, "gexp_per_s": 1.0},
    )


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the cases that were measured; measuring takes no time."""
    names: list[str] = []

    def fake(case: Case, settings: Settings, on_round: Any) -> Measurement:
        names.append(case.name)
        on_round(settings.rounds)
        return hand_made(case)

    monkeypatch.setattr(runner, "measure", fake)
    return names


def test_quick_run_and_again(command: Command, tmp_path: Path) -> None:
    said = command("bench", "plain", "cross-entropy", "--quick", "--out", tmp_path)
    assert said.code == 0, said.err
    assert {path.name for path in tmp_path.iterdir()} == {
        "plain.json",
        "cross_entropy.json",
        "plain.csv",
        "cross_entropy.csv",
        "times.csv",
        "table.md",
        "table.json",
        "report.html",
        "figures",
    }
    figures = {path.name for path in (tmp_path / "figures").iterdir()}
    assert figures == {"plain.png", "cross_entropy.png"}
    rows = json.loads((tmp_path / "plain.json").read_text())["rows"]
    assert {"torch", "normattn"} <= set(rows[0]["stamp"]["versions"])
    assert rows[0]["stamp"]["features"] == {
        name: has for name, has in torch.cpu.get_capabilities().items() if has
    }
    assert rows[0]["date"]
    assert len(rows[0]["seconds"]["SDPA"]["rounds"]) == 2
    assert rows[0]["kernels"] == {"normattn": "chunked"}
    assert all(goal["met"] is None for row in rows for goal in row["goals"])
    assert "claims nothing" in (tmp_path / "table.md").read_text()
    page = json.loads((tmp_path / "table.json").read_text())["tables"]
    timed = {(row["row"], row["entry"]): row for row in page["times"]}
    for row in rows:
        for entry, timing in row["seconds"].items():
            assert timed[row["case"], entry]["ms"]["value"] == 1e3 * timing["median"]
    before = (tmp_path / "plain.json").read_bytes()
    again = command("bench", "plain", "cross-entropy", "--quick", "--out", tmp_path)
    assert again.code == 0
    assert again.err.count("on record") == len(rows) + 2
    assert (tmp_path / "plain.json").read_bytes() == before


@pytest.mark.parametrize("suite", [name for name in SUITES if name != "train-step"])
def test_every_timed_entry_runs_at_the_quick_size(suite: str) -> None:
    """What `--quick` does, without the processes that memory takes."""
    settings = Settings.of(rounds=1, quick=True, device="cpu")
    for case in SUITES[suite].cases(settings):
        for name, entry in case.entries.items():
            if name not in case.timed:
                assert entry.build()() is not None, name
        if case.timed:
            seconds, probes = measure._time(case, settings, lambda done: None)
            assert set(seconds) == set(case.timed)
            assert all(value > 0 for value in probes.values())


def test_stopped_in_the_middle_it_goes_on(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = Settings.of(device="cpu", lengths=(1024,))
    working: Any = vars(runner)["measure"]
    calls = 0

    def stopped(*arguments: Any) -> Measurement:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        result: Measurement = working(*arguments)
        return result

    monkeypatch.setattr(runner, "measure", stopped)
    with pytest.raises(KeyboardInterrupt):
        runner.run_bench(["two-regime"], settings, tmp_path)
    first = list(measured)
    assert len(first) == 2
    monkeypatch.setattr(runner, "measure", working)
    rows = runner.run_bench(["two-regime"], settings, tmp_path)
    assert [row["case"] for row in rows] == measured
    assert len(set(measured)) == len(measured)


def test_other_code_or_rounds_are_measured_again(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(**settings: Any) -> int:
        measured.clear()
        runner.run_bench(["plain"], Settings.of(device="cpu", **settings), tmp_path)
        return len(measured)

    assert run(lengths=(1024,)) == 2
    assert run(lengths=(1024,)) == 0
    assert run(lengths=(1024, 2048)) == 2
    assert run(lengths=(1024,), rounds=11) == 2
    monkeypatch.setattr(machine, "source_digest", lambda: "other")
    assert run(lengths=(1024,), rounds=11) == 2
    cases = [row["case"] for row in json.loads((tmp_path / "plain.json").read_text())["rows"]]
    assert len(cases) == len(set(cases)) == 4


def test_missed_goals_are_explained_and_profiled(measured: list[str], tmp_path: Path) -> None:
    settings = Settings.of(device="cpu", lengths=(513,))
    runner.run_bench(["plain"], settings, tmp_path, profile=True)
    table = (tmp_path / "table.md").read_text()
    assert "0 of 2 goals are met, 0 more within 5 %, 2 are missed." in table
    assert "of the roofline" in table
    assert "## Profile of normattn, plain causal bf16 f, N 513" in table
    rows = json.loads((tmp_path / "plain.json").read_text())["rows"]
    operations = rows[0]["profiles"]["normattn"]
    assert 0 < sum(line["share"] for line in operations) <= 1 + 1e-9
    again = runner.run_bench(["plain"], settings, tmp_path, profile=True)
    assert [row["profiles"] for row in again] == [row["profiles"] for row in rows]
    assert len(measured) == 2


def test_list_shows_every_suite_and_measures_nothing(
    command: Command, measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = command("bench", "--list", "--device", "cpu")
    assert said.code == 0
    for name, suite in SUITES.items():
        assert name in said.out
        assert suite.summary in said.out
    assert "≥ 5 × faster" in said.out
    assert measured == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["two-regimes"], ["'two-regimes'", "did you mean two-regime"]),
        (["quantum"], ["'quantum'", "there are folded"]),
        (["plain", "--rounds", "8"], ["--rounds", "at least 9", "got 8", "--quick"]),
        (["plain", "--rounds", "0"], ["--rounds", "1"]),
        (["plain", "--threads", "0"], ["--threads", "1"]),
        (["plain", "--lengths", "many"], ["--lengths", "whole numbers"]),
        (["plain", "--lengths", "512"], ["--lengths", "at least 513", "got 512"]),
        (["plain", "--device", "tpu"], ["--device", "cpu or cuda", "'tpu'"]),
    ],
)
def test_bad_input(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    expected: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    said = command("bench", *options)
    assert said.code == 2
    for part in expected:
        assert part in said.sentence
    assert list(tmp_path.iterdir()) == []


def test_no_device(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = command("bench", "plain", "--device", "cuda")
    assert said.code == 2
    assert "no CUDA device" in said.sentence


def test_out_is_a_file(command: Command, tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("mine")
    said = command("bench", "plain", "--quick", "--out", place)
    assert said.code == 2
    assert f"{place} is a file" in said.sentence
    assert place.read_text() == "mine"


def test_a_peer_that_is_not_installed(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "_installed", lambda name: name != "x-transformers")
    said: Said = command("bench", "train-step", "--quick", "--out", tmp_path / "out")
    assert said.code == 2
    for part in ("x-transformers is not installed", "extra `bench`", "normattn[bench]"):
        assert part in said.sentence
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": 3}', '{"rows": [{"case": "x"}]}'])
def test_a_damaged_record(command: Command, tmp_path: Path, text: str) -> None:
    (tmp_path / "plain.json").write_text(text)
    said = command("bench", "plain", "--quick", "--out", tmp_path)
    assert said.code == 2
    assert "plain.json" in said.sentence
    assert "damaged" in said.sentence
    assert (tmp_path / "plain.json").read_text() == text


def test_tiles_are_measured_at_every_length(measured: list[str], tmp_path: Path) -> None:
    """As much work at each; a GPU has no such choice."""
    runner.run_bench(["tiles"], Settings.of(device="cpu"), tmp_path)
    assert len(measured) == 2 * 2 * 7
    assert {"tiles fp32 f, 64 × N 64", "tiles bf16 f+b, 1 × N 4096"} <= set(measured)
    with pytest.raises(InputError, match="tiles measures nothing on cuda"):
        runner.run_bench(["tiles"], Settings(device="cuda"), tmp_path / "gpu")
    assert not (tmp_path / "gpu").exists()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Settings(lengths=(1024,), quick=True), "quick False, and quick True"),
        (Settings(lengths=(1024,), threads=2), "threads 1, and threads 2"),
    ],
)
def test_rows_of_one_folder_are_of_one_kind(
    measured: list[str], tmp_path: Path, other: Settings, words: str
) -> None:
    runner.run_bench(["plain"], Settings(lengths=(1024,)), tmp_path)
    before = (tmp_path / "plain.json").read_bytes()
    with pytest.raises(InputError, match=f"rows of {words} was asked for; choose another --out"):
        runner.run_bench(["plain"], other, tmp_path)
    assert (tmp_path / "plain.json").read_bytes() == before


def test_every_suite_can_be_judged(measured: list[str], tmp_path: Path) -> None:
    """Goals fit their entries, and the roofline knows the work of each, at the real sizes."""
    settings = Settings.of(device="cpu")
    for suite in SUITES.values():
        cases = suite.cases(settings)
        assert len({case.name for case in cases}) == len(cases)
        assert len({case.digest for case in cases}) == len(cases)
        for case in cases:
            assert set(roofline(case, hand_made(case))) == set(case.timed)

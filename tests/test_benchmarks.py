"""The benchmarks' own path: cases, records, and a table that says what was measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import attention, decoding, extending
from benchmarks.__main__ import BENCHMARKS, main, parse
from benchmarks.harness import Case, Options, measure, ratio, write_record


def test_a_record_names_the_machine_and_every_round(tmp_path: Path) -> None:
    numbers, options = torch.randn(64, 64), Options(rounds=3)
    entries = {"once": lambda: lambda: numbers @ numbers, "twice": lambda: lambda: numbers.exp()}
    result = measure(Case("products", entries, "once"), options)
    table = write_record([result], options, tmp_path)
    record = json.loads((tmp_path / "benchmarks.json").read_text())
    assert {"torch", "cpu", "threads", "date"} <= record["machine"].keys()
    seconds = record["results"][0]["seconds"]
    assert sorted(seconds) == ["once", "twice"]
    for timing in seconds.values():
        assert len([s for s in timing["rounds"] if s > 0]) == len(timing["rounds"]) == 3
    assert table == (tmp_path / "benchmarks.md").read_text()
    assert table.count("| products |") == 2


def test_peers_compute_the_same_attention() -> None:
    """What is written by hand computes what the score does."""
    shape = attention.Shape(600, torch.float64, False, "cpu")
    for peer, score in (
        (attention.two_matrices(shape), f"Baseline-ReRoPE(window={attention.WINDOW})@2048"),
        (attention.rope_sdpa(shape), "Baseline"),
        (attention.masked_alibi(shape, learned=False), "Baseline-ALiBi"),
        (attention.plain_sdpa(shape), "Baseline-NoPE"),
    ):
        torch.testing.assert_close(peer(), attention.scored(shape, score)())
    shape = attention.Shape(32, torch.float64, False, "cpu")
    torch.testing.assert_close(decoding.by_hand(shape)(), decoding.cached(shape, "Baseline")())


def test_an_extended_layer_reads_and_decodes() -> None:
    pytest.importorskip("transformers")
    for decoding_one in (False, True):
        step = extending.reading(64, "fp32", "cpu", "YaRN(factor=4)", decoding_one)
        assert torch.isfinite(torch.as_tensor(step())).all()


@pytest.mark.parametrize("name", ["plain", "decode", "bias"])
def test_the_command_measures_what_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([name, "--quick", "--dtypes", "fp32", "--out", str(tmp_path)])
    assert f"| {name} fp32" in capsys.readouterr().out


def test_bad_names_and_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["roofline"], ["plain", "--rounds", "0"], ["--dtypes", "int8"]):
        with pytest.raises(SystemExit) as ended:
            parse(arguments)
        assert ended.value.code == 2
    assert "roofline" in capsys.readouterr().err


def test_every_benchmark_has_cases_with_a_peer() -> None:
    for function in BENCHMARKS.values():
        for case in function(Options(quick=True, dtypes=("fp32",))):
            assert case.peer in case.entries
            assert len(case.entries) > 1


def test_paired_rounds_cancel_the_drift_of_the_machine() -> None:
    drift = [1.0, 5.0, 2.0, 9.0, 3.0, 4.0, 8.0, 6.0, 7.0]
    found = ratio([1.5 * x for x in drift], drift)
    assert (found.low, found.high) == pytest.approx((1.5, 1.5))

"""Verdicts, the roofline and tables from measurements made by hand."""

from __future__ import annotations

import pytest
import torch

from normattn.bench.attending import Causal
from normattn.bench.case import Case, Goal
from normattn.bench.judge import Verdict, judge, roofline, why_missed
from normattn.bench.measure import Measurement
from normattn.bench.peers import Stock
from normattn.lab.runs.timing import Timing
from normattn.lab.stats import Estimate

CALL = Causal(1000, torch.float32, False, heads=1)
CASE = Case(
    "hand-made",
    {"ours": Stock(CALL), "peer": Stock(CALL, rope=True)},
    (
        Goal("ours", "peer", at_most=1.0),
        Goal("ours", "peer", of="memory", at_least=4.0),
        Goal("ours", "peer"),
    ),
)
FOUND = Measurement(
    {"ours": Timing((0.2,) * 9), "peer": Timing((0.1,) * 9)},
    {"ours": (2.0,), "peer": (10.0,)},
    {},
    {"gemm_gflops": 1.0, "bandwidth_gb_per_s": 1.0, "gexp_per_s": 1.0},
)


def test_verdicts() -> None:
    time, memory, reported = judge(CASE, FOUND)
    assert (time.ratio.value, time.met) == (2.0, False)
    assert time.cell.text == "2.000 [2.000, 2.000]"
    assert (time.beyond(1.0), time.beyond(None)) == (Estimate(100.0, 100.0, 100.0, units=1), None)
    assert (memory.ratio.value, memory.met) == (0.2, True)
    assert memory.cell.text == "5 × [5, 5]"
    assert memory.cell.estimate == Estimate(5.0, 5.0, 5.0, units=1)
    beyond = memory.beyond(memory.limit)
    assert beyond is not None
    assert beyond.value == pytest.approx(-20.0)
    assert reported.met is None
    assert all(verdict.met is None for verdict in judge(CASE, FOUND, claims=False))


def test_roofline_is_products_and_exponentials() -> None:
    line = roofline(CASE, FOUND)["ours"]
    pairs = 1000 * 1001 / 2
    assert line["gemm_seconds"] == pytest.approx(4 * 64 * pairs / 1e9)
    assert line["exp_seconds"] == pytest.approx(pairs / 1e9)
    assert line["floor_seconds"] == pytest.approx(line["gemm_seconds"] + line["exp_seconds"])
    assert line["share"] == pytest.approx(line["floor_seconds"] / 0.2)


def test_a_missed_goal_is_explained_and_no_other() -> None:
    lines = roofline(CASE, FOUND)
    missed, met, _ = judge(CASE, FOUND)
    said = why_missed(missed, lines, FOUND)
    assert said is not None
    assert "ours takes 200 ms" in said
    assert "peer takes 100 ms" in said
    assert why_missed(met, lines, FOUND) is None


def test_measurements_and_verdicts_survive_a_record() -> None:
    assert Measurement.read(FOUND.summary()) == FOUND
    for verdict in judge(CASE, FOUND):
        stored = {**vars(verdict), "ratio": vars(verdict.ratio)}
        assert Verdict.read(stored) == verdict

"""From a measurement to what it says about the goals, and why a goal was missed."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from normattn.bench.case import Case, Goal
from normattn.bench.measure import Measurement
from normattn.lab.report.table import Cell
from normattn.lab.runs.timing import Ratio, ratio
from normattn.lab.stats import Estimate


@dataclass(frozen=True)
class Verdict:
    """A goal, the ratio ours / peer that was measured, and whether that meets it."""

    ours: str
    peer: str
    of: str
    goal: str
    limit: float | None
    ratio: Ratio
    met: bool | None

    @property
    def inverted(self) -> bool:
        """Whether the goal speaks of how many times faster or smaller ours is."""
        return self.goal.startswith("≥")

    @property
    def exactly(self) -> bool:
        """Whether the goal is met without tolerance."""
        return self.limit is not None and self.ratio.value <= self.limit

    @property
    def cell(self) -> Cell:
        """The measured value and its interval as the goal states it."""
        estimate, times = Estimate(*self._ends, units=1), ""
        if self.inverted:
            value, low, high = self._ends
            estimate, times = Estimate(1 / value, 1 / high, 1 / low, units=1), " ×"
        digits = 2 if estimate.value < 0.1 else 3
        form = f".{digits}g" if self.inverted or estimate.value < 0.1 else f".{digits}f"
        text = f"{estimate.value:{form}}{times} [{estimate.low:{form}}, {estimate.high:{form}}]"
        return Cell(text, estimate)

    def beyond(self, limit: float | None) -> Estimate | None:
        """By how many percent ours exceeds `limit` times the peer; None for no limit."""
        if limit is None:
            return None
        value, low, high = (100 * (end / limit - 1) for end in self._ends)
        return Estimate(value, low, high, units=1)

    @property
    def _ends(self) -> tuple[float, float, float]:
        return self.ratio.value, self.ratio.low, self.ratio.high

    @staticmethod
    def read(stored: dict[str, Any]) -> Verdict:
        """The verdict that a record holds."""
        names = ("ours", "peer", "of", "goal", "limit", "met")
        return Verdict(ratio=Ratio(**stored["ratio"]), **{name: stored[name] for name in names})


def judge(case: Case, measurement: Measurement, claims: bool = True) -> list[Verdict]:
    """A verdict for every goal of `case`; without `claims` none is called met or missed."""
    return [_verdict(goal, measurement, claims) for goal in case.goals]


def _verdict(goal: Goal, measurement: Measurement, claims: bool) -> Verdict:
    measured = ratio(measurement.values(goal.ours, goal.of), measurement.values(goal.peer, goal.of))
    met = goal.met(measured.value) if claims else None
    return Verdict(goal.ours, goal.peer, goal.of, str(goal), goal.limit, measured, met)


def roofline(case: Case, measurement: Measurement) -> dict[str, dict[str, float]]:
    """For each timed entry the least time of its work at the peaks of the same run.

    floor = max((flops / GEMM rate) + (exponentials / exp rate), bytes / bandwidth): a core does
    products and exponentials in turn, and moves memory meanwhile. `share` is floor / median.
    """
    if not measurement.seconds:
        return {}
    gemm = measurement.probes["gemm_gflops"] * 1e9
    bandwidth = measurement.probes["bandwidth_gb_per_s"] * 1e9
    exponential = measurement.probes["gexp_per_s"] * 1e9
    lines = {}
    for name, timing in measurement.seconds.items():
        work = case.entries[name].work()
        parts = {
            "gemm_seconds": work.flops / gemm,
            "exp_seconds": work.exps / exponential,
            "memory_seconds": work.bytes / bandwidth,
        }
        floor = max(parts["gemm_seconds"] + parts["exp_seconds"], parts["memory_seconds"])
        lines[name] = {
            **asdict(work),
            **parts,
            "floor_seconds": floor,
            "share": floor / timing.median,
        }
    return lines


def why_missed(
    verdict: Verdict, lines: dict[str, dict[str, float]], measurement: Measurement
) -> str | None:
    """A sentence that places a missed goal between the machine's peaks, or None."""
    if verdict.met is not False:
        return None
    ours, peer = (
        statistics.median(measurement.values(name, verdict.of))
        for name in (verdict.ours, verdict.peer)
    )
    if verdict.of != "time":
        return f"{verdict.ours} adds {ours:.1f} MiB at its peak, {verdict.peer} {peer:.1f} MiB"
    line, other = lines[verdict.ours], lines[verdict.peer]
    return (
        f"{verdict.ours} takes {1e3 * ours:.3g} ms, {line['share']:.0%} of the roofline "
        f"(products {1e3 * line['gemm_seconds']:.3g} ms, exponentials "
        f"{1e3 * line['exp_seconds']:.3g} ms, memory {1e3 * line['memory_seconds']:.3g} ms); "
        f"{verdict.peer} takes {1e3 * peer:.3g} ms, {other['share']:.0%} of its own; "
        f"at the roofline the ratio would be {line['floor_seconds'] / peer:.2f}"
    )

"""Records of classifications → rows and paired differences of the norm study."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normattn.errors import InputError
from normattn.reports.bootstrap import Bootstrap
from normattn.reports.classification_record import ClassificationRecord, macro_f1, micro_f1
from normattn.reports.metrics import Estimate
from normattn.reports.rmsnorm_records import StepTimes, Training
from normattn.reports.summed import Statistic, ratio_of

Array = NDArray[np.float64]
LAYER, RMS = "LayerNorm", "RMSNorm"

METRICS: dict[str, Statistic] = {
    each.key: each
    for each in (
        Statistic("micro_f1", "micro F1, points", "counts", micro_f1, digits=2),
        Statistic("macro_f1", "macro F1, points", "counts", macro_f1, digits=2),
        Statistic(
            *("loss", "loss, thousandths of a nat", "losses", ratio_of(1000.0)),
            digits=2,
            higher=False,
        ),
    )
}
"""The columns that come from the test documents."""

_COUNTS: dict[str, Callable[[ClassificationRecord], Array]] = {
    "counts": ClassificationRecord.counts,
    "losses": ClassificationRecord.losses,
}


@dataclass(frozen=True)
class NormRow:
    """One norm: its statistics over all seeds; `step` is in ms, `seconds` a mean over seeds."""

    norm: str
    seeds: tuple[int, ...]
    parameters: int
    thresholds: tuple[float, ...]
    metrics: Mapping[str, Estimate]
    step: Estimate | None
    seconds: float | None

    def as_json(self) -> dict[str, Any]:
        """The row of table.json."""
        return {
            "norm": self.norm,
            "seeds": list(self.seeds),
            "parameters": self.parameters,
            "thresholds": list(self.thresholds),
            **{key: value.as_json() for key, value in self.metrics.items()},
            "step_ms": self.step.as_json() if self.step else None,
            "training_seconds": self.seconds,
        }


def norm_rows(
    records: Sequence[ClassificationRecord],
    trainings: Mapping[tuple[str, int], Training],
    times: StepTimes | None,
    bootstrap: Bootstrap,
) -> list[NormRow]:
    """A row for each norm, LayerNorm first; raises `InputError` for records of different data."""
    groups = _grouped(records)
    return [
        NormRow(
            norm=norm,
            seeds=tuple(record.seed for record in group),
            parameters=group[0].parameters,
            thresholds=tuple(record.threshold for record in group),
            metrics={key: _estimate(group, metric, bootstrap) for key, metric in METRICS.items()},
            step=None if times is None else _step(times, norm, bootstrap),
            seconds=_mean([trainings[norm, record.seed].seconds for record in group]),
        )
        for norm, group in groups.items()
    ]


def differences(
    records: Sequence[ClassificationRecord], bootstrap: Bootstrap
) -> dict[str, Estimate]:
    """RMSNorm − LayerNorm on the seeds that both have, paired; empty where they share none."""
    groups = _grouped(records)
    shared = {r.seed for r in groups.get(RMS, ())} & {r.seed for r in groups.get(LAYER, ())}
    if not shared:
        return {}
    ours, other = ([r for r in groups[norm] if r.seed in shared] for norm in (RMS, LAYER))
    found = {}
    for key, metric in METRICS.items():
        values = [_value_and_samples(group, metric, bootstrap) for group in (ours, other)]
        (a, drawn_a), (b, drawn_b) = values
        found[key] = _as_estimate(a - b, drawn_a - drawn_b, ours, bootstrap)
    return found


def time_ratio(times: StepTimes, bootstrap: Bootstrap) -> Estimate | None:
    """The time of a step with RMSNorm over that with LayerNorm, rounds resampled as pairs."""
    if not {LAYER, RMS} <= times.seconds.keys():
        return None
    ours, other = (np.asarray(times.seconds[norm]) for norm in (RMS, LAYER))
    drawn = _rounds(len(ours), bootstrap)
    value = float(np.median(ours) / np.median(other))
    samples = np.median(ours[drawn], axis=1) / np.median(other[drawn], axis=1)
    return _of_rounds(value, samples, len(ours), bootstrap)


def _step(times: StepTimes, norm: str, bootstrap: Bootstrap) -> Estimate | None:
    if norm not in times.seconds:
        return None
    rounds = 1000 * np.asarray(times.seconds[norm])
    samples = np.median(rounds[_rounds(len(rounds), bootstrap)], axis=1)
    return _of_rounds(float(np.median(rounds)), samples, len(rounds), bootstrap)


def _rounds(count: int, bootstrap: Bootstrap) -> NDArray[np.int64]:
    generator = np.random.default_rng([bootstrap.seed, 3, count])
    return generator.integers(count, size=(bootstrap.resamples, count))


def _of_rounds(value: float, samples: Array, count: int, bootstrap: Bootstrap) -> Estimate:
    low, high = (float(end[0]) for end in bootstrap.interval(samples[:, None]))
    return Estimate(value, low, high, documents=count, tokens=0, seeds=1)


def _grouped(records: Sequence[ClassificationRecord]) -> dict[str, list[ClassificationRecord]]:
    """The records of each norm by seed; all must be of the same documents."""
    if len({(record.data, record.documents, record.split) for record in records}) > 1:
        raise InputError("the records are of different documents; report them apart")
    groups: dict[str, list[ClassificationRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda r: (r.variant, r.seed)):
        groups[record.variant].append(record)
    return dict(groups)


def _estimate(
    group: Sequence[ClassificationRecord], metric: Statistic, bootstrap: Bootstrap
) -> Estimate:
    return _as_estimate(*_value_and_samples(group, metric, bootstrap), group, bootstrap)


def _value_and_samples(
    group: Sequence[ClassificationRecord], metric: Statistic, bootstrap: Bootstrap
) -> tuple[float, Array]:
    """A statistic of all seeds' and documents' counts, and of every resample's."""
    counts = np.stack([_COUNTS[metric.field](record) for record in group])
    whole, drawn = counts.sum((0, 1)), bootstrap.sums(counts)
    samples = macro_f1(drawn, whole) if metric.of is macro_f1 else metric.of(drawn)
    return float(metric.of(whole)), samples


def _as_estimate(
    value: float, samples: Array, group: Sequence[ClassificationRecord], bootstrap: Bootstrap
) -> Estimate:
    low: float | None = None
    high: float | None = None
    if len(group[0].documents) > 1:
        low, high = (round(float(end[0]), 9) + 0.0 for end in bootstrap.interval(samples[:, None]))
    documents = len(group[0].documents)
    return Estimate(round(value, 9) + 0.0, low, high, documents, 0, len(group))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 1) if known else None

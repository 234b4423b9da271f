"""Translated test sets as rows: seeds gathered, intervals over sentences, differences paired."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normattn.errors import InputError
from normattn.reports.bootstrap import Bootstrap
from normattn.reports.metrics import Estimate
from normattn.reports.summed import Counted, Statistic
from normattn.reports.translation_record import STATISTICS, TranslationRecord

Array = NDArray[np.float64]
REFERENCE = "Baseline"


@dataclass(frozen=True)
class Ended:
    """A training that ended in NaN: of which score and seed, at which step, and where it began."""

    variant: str
    seed: int
    step: int
    where: str

    @property
    def sentence(self) -> str:
        """What happened."""
        return (
            f"{self.variant}, seed {self.seed}: diverged at step {self.step}; the first value that "
            f"is not finite came from {self.where}."
        )


@dataclass(frozen=True)
class TranslationRow:
    """One score: its statistics, their differences to Baseline, and the seeds that ended in NaN."""

    variant: str
    seeds: tuple[int, ...]
    values: Mapping[str, Estimate | None]
    changes: Mapping[str, Estimate | None]
    ended: tuple[Ended, ...] = ()
    records: tuple[TranslationRecord, ...] = field(default=(), repr=False)

    def as_json(self) -> dict[str, Any]:
        """The row of table.json."""

        def facts(found: Mapping[str, Estimate | None]) -> dict[str, Any]:
            return {key: each.as_json() if each else None for key, each in found.items()}

        return {
            "variant": self.variant,
            "seeds": list(self.seeds),
            **facts(self.values),
            "change": facts(self.changes),
            "diverged": [{"seed": each.seed, "step": each.step} for each in self.ended],
        }


def translation_rows(
    records: Sequence[TranslationRecord],
    ended: Sequence[Ended],
    order: Sequence[str] = (),
    bootstrap: Bootstrap | None = None,
) -> list[TranslationRow]:
    """One row per score, those of `order` first; differences are paired over sentences and seeds.

    With several seeds a statistic is that of all their translations together. Raises `InputError`
    for records of different sentences.
    """
    if len({(record.data, record.split) for record in records}) > 1:
        raise InputError("the records are of different sentences; report them apart")
    drawn = bootstrap or Bootstrap()
    groups: dict[str, list[TranslationRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda each: each.seed):
        groups[record.variant].append(record)
    failed: dict[str, list[Ended]] = defaultdict(list)
    for each in sorted(ended, key=lambda each: each.seed):
        failed[each.variant].append(each)
    names = sorted(
        groups.keys() | failed.keys(),
        key=lambda name: (order.index(name) if name in order else len(order), name),
    )
    base = groups.get(REFERENCE, [])
    return [_row(name, groups.get(name, []), base, tuple(failed[name]), drawn) for name in names]


def estimate_of(
    records: Sequence[Counted], statistic: Statistic, bootstrap: Bootstrap
) -> Estimate | None:
    """A statistic of all the records' sentences together; None where one has no such counts."""
    counts = _counts(records, statistic)
    if counts is None:
        return None
    samples = statistic.of(bootstrap.sums(counts))
    return _estimate(float(statistic.of(counts.sum((0, 1)))), samples, records, bootstrap)


def change_of(
    records: Sequence[Counted],
    base: Sequence[Counted],
    statistic: Statistic,
    bootstrap: Bootstrap,
) -> Estimate | None:
    """The statistic of `records` minus that of `base`, over the seeds that both have."""
    shared = {record.seed for record in records} & {record.seed for record in base}
    ours, theirs = ([r for r in group if r.seed in shared] for group in (records, base))
    a, b = _counts(ours, statistic), _counts(theirs, statistic)
    if a is None or b is None:
        return None
    of, sums = statistic.of, bootstrap.sums
    value = float(of(a.sum((0, 1))) - of(b.sum((0, 1))))
    return _estimate(value, of(sums(a)) - of(sums(b)), ours, bootstrap)


def _row(
    name: str,
    group: Sequence[TranslationRecord],
    base: Sequence[TranslationRecord],
    ended: tuple[Ended, ...],
    bootstrap: Bootstrap,
) -> TranslationRow:
    return TranslationRow(
        variant=name,
        seeds=tuple(record.seed for record in group),
        values={each.key: estimate_of(group, each, bootstrap) for each in STATISTICS},
        changes={
            each.key: None if name == REFERENCE else change_of(group, base, each, bootstrap)
            for each in STATISTICS
        },
        ended=ended,
        records=tuple(group),
    )


def _counts(records: Sequence[Counted], statistic: Statistic) -> Array | None:
    """Counts of shape (seeds, sentences, counts)."""
    found = [record.counts(statistic.field) for record in records]
    kept = [each for each in found if each is not None]
    return np.stack(kept) if kept and len(kept) == len(found) else None


def _estimate(
    value: float, samples: Array, records: Sequence[Counted], bootstrap: Bootstrap
) -> Estimate:
    low, high = bootstrap.interval(samples[:, None])
    first = records[0]
    return Estimate(
        value=_clean(value),
        low=_clean(low[0]),
        high=_clean(high[0]),
        documents=len(first.tokens),
        tokens=sum(first.tokens),
        seeds=len(records),
    )


def _clean(value: float) -> float:
    # Far below any interval's width, and above what the order of a sum can change.
    return round(float(value), 9) + 0.0

"""Tested Vision Transformers as rows: seeds gathered, intervals over images, differences paired."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from normattn.errors import InputError
from normattn.reports.bootstrap import Bootstrap
from normattn.reports.metrics import Estimate
from normattn.reports.translations import REFERENCE, change_of, estimate_of
from normattn.reports.vision_record import STATISTICS, VisionDivergence, VisionRecord


@dataclass(frozen=True)
class VisionRow:
    """All seeds of one score at one multiple of the learning rate.

    `base` are the records of Baseline at the same rate, to which differences are paired.
    """

    score: str
    rate: float
    records: tuple[VisionRecord, ...]
    diverged: tuple[VisionDivergence, ...]
    base: tuple[VisionRecord, ...]
    bootstrap: Bootstrap

    @property
    def learning_rate(self) -> float:
        """The highest learning rate of the schedule."""
        return self.records[0].learning_rate if self.records else self.diverged[0].learning_rate

    @cached_property
    def values(self) -> dict[str, Estimate | None]:
        """Each statistic; None where no seed came to its end."""
        if not self.records:
            return dict.fromkeys(each.key for each in STATISTICS)
        return {s.key: estimate_of(self.records, s, self.bootstrap) for s in STATISTICS}

    @cached_property
    def changes(self) -> dict[str, Estimate | None]:
        """Each statistic minus Baseline's, over the images and the seeds that both have."""
        if not self.records or not self.base or self.score == REFERENCE:
            return dict.fromkeys(each.key for each in STATISTICS)
        return {s.key: change_of(self.records, self.base, s, self.bootstrap) for s in STATISTICS}

    def as_json(self) -> dict[str, Any]:
        """The row in vision.json."""

        def facts(found: Mapping[str, Estimate | None]) -> dict[str, Any]:
            return {key: each.as_json() if each else None for key, each in found.items()}

        return {
            "score": self.score,
            "rate": self.rate,
            "learning_rate": self.learning_rate,
            "seeds": [record.seed for record in self.records],
            "largest": [record.largest for record in self.records],
            "entropy_share": [record.entropy_share for record in self.records],
            **facts(self.values),
            "change": facts(self.changes),
            "diverged": [{"seed": each.seed, "step": each.step} for each in self.diverged],
        }


def vision_rows(
    records: Sequence[VisionRecord],
    diverged: Sequence[VisionDivergence],
    order: Sequence[str] = (),
    bootstrap: Bootstrap | None = None,
) -> list[VisionRow]:
    """One row for each score and rate, those of `order` first."""
    if not records and not diverged:
        raise InputError("there is nothing to report: no Vision Transformer was trained")
    if len({(record.data, record.split) for record in records}) > 1:
        raise InputError("the records are of different images; report them apart")
    kept: dict[tuple[str, float], list[VisionRecord]] = defaultdict(list)
    ended: dict[tuple[str, float], list[VisionDivergence]] = defaultdict(list)
    for record in sorted(records, key=lambda each: each.seed):
        kept[record.score, record.rate].append(record)
    for each in sorted(diverged, key=lambda each: each.seed):
        ended[each.score, each.rate].append(each)
    first = (REFERENCE, *order)

    def place(key: tuple[str, float]) -> tuple[int, str, float]:
        score, rate = key
        return (first.index(score) if score in first else len(first), score, rate)

    return [
        VisionRow(
            *key,
            records=tuple(kept.get(key, ())),
            diverged=tuple(ended.get(key, ())),
            base=tuple(kept.get((REFERENCE, key[1]), ())),
            bootstrap=bootstrap or Bootstrap(),
        )
        for key in sorted(kept.keys() | ended.keys(), key=place)
    ]

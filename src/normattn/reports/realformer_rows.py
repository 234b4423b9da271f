"""The RealFormer study's rows: seeds gathered, estimates with intervals, differences paired."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from normattn.errors import InputError
from normattn.reports.bootstrap import Bootstrap, ratio
from normattn.reports.metrics import Estimate
from normattn.reports.realformer_records import Depth, EncoderRecord, Setting

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Ratio:
    """A statistic: sums (seeds, documents, bins) over sums of the same shape, times `scale`."""

    above: Array
    below: Array
    scale: float = 1.0

    def value(self) -> Array:
        """The statistic itself, (bins,)."""
        return ratio(self.above, self.below) * self.scale

    def mean(self, bins: Sequence[int]) -> Ratio:
        """The mean over some bins, as one."""
        kept = list(bins)
        above = self.above[..., kept].mean(-1, keepdims=True)
        return Ratio(above, self.below[..., kept[:1]], self.scale)

    def samples(self, bootstrap: Bootstrap) -> Array:
        """It under every resample, (resamples, bins)."""
        return bootstrap.samples(self.above, self.below) * self.scale


@dataclass(frozen=True)
class EncoderRow:
    """All seeds of one row; `name` and `size` are what it is called by, `setting` that of a seed.

    Arrays are (seeds, documents, …), seeds ascending.
    """

    setting: Setting
    records: tuple[EncoderRecord, ...]

    @property
    def key(self) -> tuple[str, str]:
        """Size and name, which tell rows apart."""
        return self.setting.size, self.setting.row

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that were trained."""
        return tuple(record.setting.seed for record in self.records)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Documents, chosen tokens and seeds behind each value."""
        first = self.records[0]
        return len(first.documents), sum(first.tokens), len(self.records)

    def only(self, seeds: Sequence[int]) -> EncoderRow:
        """The row made of some of its seeds."""
        kept = tuple(record for record in self.records if record.setting.seed in seeds)
        return EncoderRow(self.setting, kept)

    def accuracy(self) -> Ratio:
        """Chosen tokens that are hit, in %."""
        return Ratio(self._stack("correct"), self._stack("tokens"), 100.0)

    def loss(self) -> Ratio:
        """Nats per chosen token."""
        return Ratio(self._stack("loss"), self._stack("tokens"))

    def unigram(self) -> Ratio:
        """Nats per chosen token of the words' frequencies alone."""
        return Ratio(self._stack("unigram_loss"), self._stack("tokens"))

    def layers(self, name: str) -> Ratio:
        """A field of `Depth` per layer: hits in %, anything else a mean over texts."""
        sums = np.array([getattr(_depth(each), name) for each in self.records], dtype=np.float64)
        what, scale = ("tokens", 100.0) if name == "correct" else ("windows", 1.0)
        return Ratio(sums, np.broadcast_to(self._stack(what), sums.shape), scale)

    def gradients(self, name: str) -> Ratio | None:
        """The norm of the gradient per layer, a mean over batches, which stand for documents."""
        sums = np.array([getattr(_depth(each), name) for each in self.records], dtype=np.float64)
        return Ratio(sums, np.ones_like(sums)) if sums.size else None

    def _stack(self, name: str) -> Array:
        return np.array([getattr(each, name) for each in self.records], dtype=np.float64)[..., None]


def encoder_rows(records: Sequence[EncoderRecord]) -> list[EncoderRow]:
    """The rows in the order of the records; raises `InputError` for records of different texts."""
    if len({(record.data, record.train_length) for record in records}) > 1:
        raise InputError("the records are of different texts; report them apart")
    groups: dict[tuple[str, str], list[EncoderRecord]] = defaultdict(list)
    for record in records:
        groups[record.setting.size, record.setting.row].append(record)
    found = []
    for group in groups.values():
        ordered = sorted(group, key=lambda record: record.setting.seed)
        settings = {each.setting.model_copy(update={"seed": 0}) for each in ordered}
        if len(settings) > 1:
            raise InputError(f"the seeds of {ordered[0].setting.row} were trained differently")
        found.append(EncoderRow(ordered[0].setting, tuple(ordered)))
    return found


def estimated(
    terms: Sequence[tuple[float, Ratio]],
    counts: tuple[int, int, int],
    bootstrap: Bootstrap,
    bin_: int = 0,
) -> Estimate:
    """A sum of statistics, each times its factor, in one bin; all share documents and seeds.

    Differences made so are paired: the draws depend on the number of documents and seeds alone.
    """
    value = sum(factor * float(each.value()[bin_]) for factor, each in terms)
    documents, tokens, seeds = counts
    if documents < 2:
        return Estimate(_clean(value), None, None, documents, tokens, seeds)
    drawn = [factor * each.samples(bootstrap)[:, bin_] for factor, each in terms]
    low, high = bootstrap.interval(np.sum(drawn, axis=0)[:, None])
    return Estimate(
        _clean(value), _clean(float(low[0])), _clean(float(high[0])), documents, tokens, seeds
    )


def by_layer(
    statistic: Ratio, counts: tuple[int, int, int], bootstrap: Bootstrap
) -> list[Estimate]:
    """One estimate for each bin."""
    values = statistic.value()
    documents, tokens, seeds = counts
    if statistic.above.shape[1] < 2:
        return [Estimate(_clean(float(v)), None, None, documents, tokens, seeds) for v in values]
    low, high = bootstrap.interval(statistic.samples(bootstrap))
    return [
        Estimate(_clean(float(v)), _clean(float(a)), _clean(float(b)), documents, tokens, seeds)
        for v, a, b in zip(values, low, high, strict=True)
    ]


def paired(a: EncoderRow, b: EncoderRow) -> tuple[EncoderRow, EncoderRow]:
    """Both made of the seeds that they share; raises `InputError` where they share none."""
    seeds = sorted(set(a.seeds) & set(b.seeds))
    if not seeds:
        raise InputError(
            f"{a.setting.row} and {b.setting.row} share no seed; they cannot be paired"
        )
    return a.only(seeds), b.only(seeds)


def _depth(record: EncoderRecord) -> Depth:
    if record.depth is None:
        raise InputError(f"{record.setting.row} was not looked into layer by layer")
    return record.depth


def _clean(value: float) -> float:
    return round(value, 9) + 0.0

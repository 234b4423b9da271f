"""The mechanism study's table: what key norms decide, and how far cosines leave their range."""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normattn.atomic import write_text
from normattn.errors import InputError
from normattn.reports.bootstrap import Bootstrap
from normattn.reports.cells import VARIANT_ORDER
from normattn.reports.markdown import grid
from normattn.reports.mechanism_records import MechanismRecord
from normattn.reports.metrics import Estimate
from normattn.reports.table import Divergence

Array = NDArray[np.float64]
TAIL = 0.001
"""The share of the cosines at L left out at either end of their range."""
QUANTILES = (TAIL, 0.25, 0.5, 0.75, 1 - TAIL)


@dataclass(frozen=True)
class MechanismRow:
    """One variant: its statistics with intervals, and what the figures draw.

    `correlation` is None where every key has one norm. `heads_clear` counts heads whose correlation
    has an interval above 0, below 0, and how many heads there are.
    """

    variant: str
    seeds: tuple[int, ...]
    train_length: int
    length: int
    correlation: Estimate | None
    raw_correlation: Estimate
    heads_clear: tuple[int, int, int]
    spread: Estimate
    near: tuple[Estimate, ...]
    far: tuple[Estimate, ...]
    near_ends: tuple[float, float]
    far_ends: tuple[float, float]
    outside: Estimate
    density: Array = field(repr=False)

    def as_json(self) -> dict[str, Any]:
        """The row of table.json."""
        return {
            "variant": self.variant,
            "seeds": list(self.seeds),
            "train_length": self.train_length,
            "length": self.length,
            "correlation": self.correlation.as_json() if self.correlation else None,
            "raw_correlation": self.raw_correlation.as_json(),
            "heads_above_below_all": list(self.heads_clear),
            "spread": self.spread.as_json(),
            "quantiles": list(QUANTILES),
            "cosine_near": [each.as_json() for each in self.near],
            "cosine_far": [each.as_json() for each in self.far],
            "cosine_ends_near": list(self.near_ends),
            "cosine_ends_far": list(self.far_ends),
            "outside_percent": self.outside.as_json(),
        }


def mechanism_rows(
    records: Sequence[MechanismRecord], bootstrap: Bootstrap | None = None
) -> list[MechanismRow]:
    """One row per variant, its seeds pooled; raises `InputError` for records of different texts."""
    groups: dict[str, list[MechanismRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.seed):
        groups[record.variant].append(record)
    if len({(r.data, r.length, r.layers, r.heads) for r in records}) > 1:
        raise InputError("the records are of different texts or models; report them apart")
    names = sorted(groups, key=_order)
    return [_row(groups[name], bootstrap or Bootstrap()) for name in names]


def mechanism_report(
    records: Sequence[MechanismRecord],
    diverged: Sequence[Divergence],
    out: Path,
    bootstrap: Bootstrap | None = None,
) -> list[Path]:
    """Write table.md, .csv, .json and the figures into `out`; return the figures' files.

    The same records give the same bytes. Raises `InputError` when there is nothing to report.
    """
    if not records:
        raise InputError("there is nothing to report: no model was looked into")
    rows = mechanism_rows(records, bootstrap)
    write_text(out / "table.md", _markdown(rows, records, diverged))
    facts = [row.as_json() for row in rows]
    write_text(out / "table.json", json.dumps(facts, indent=2, allow_nan=False) + "\n")
    write_text(out / "table.csv", _csv(rows))
    from normattn.reports.figures.mechanism import draw_mechanism

    return draw_mechanism(rows, out / "figures")


def _row(group: Sequence[MechanismRecord], bootstrap: Bootstrap) -> MechanismRow:
    first = group[0]
    stack = {name: _stacked(group, name) for name in _SUMS}
    windows = _stacked(group, "windows")
    heads = first.layers * first.heads
    near, far = _stacked(group, "near"), _stacked(group, "far")

    def mean(above: Array, below: Array) -> Estimate:
        return _ratio(above.sum(-1), below, group, bootstrap)

    varied = stack["varied"]
    each_head = [
        _ratio(stack["correlation"][..., head], varied[..., head], group, bootstrap)
        for head in range(heads)
        if varied[..., head].sum() > 0
    ]
    allowed = _allowed(near)
    outside = np.where(allowed, 0.0, far).sum((-2, -1))
    return MechanismRow(
        variant=first.variant,
        seeds=tuple(record.seed for record in group),
        train_length=first.train_length,
        length=first.length,
        correlation=mean(stack["correlation"], varied.sum(-1)) if each_head else None,
        raw_correlation=mean(stack["raw_correlation"], windows * heads),
        heads_clear=(
            sum(each.above_zero for each in each_head),
            sum(each.below_zero for each in each_head),
            heads,
        ),
        spread=mean(stack["spread"], windows * heads),
        near=_quantiles(near, group, bootstrap),
        far=_quantiles(far, group, bootstrap),
        near_ends=_ends(group, "near_ends"),
        far_ends=_ends(group, "far_ends"),
        outside=_ratio(100 * outside, far.sum((-2, -1)), group, bootstrap),
        density=_stacked(group, "density").sum(0),
    )


_SUMS = ("correlation", "varied", "raw_correlation", "spread")


def _stacked(group: Sequence[MechanismRecord], name: str) -> Array:
    """A field of all seeds, (seeds, …)."""
    return np.asarray([getattr(record, name) for record in group], dtype=np.float64)


def _ratio(
    above: Array, below: Array, group: Sequence[MechanismRecord], bootstrap: Bootstrap
) -> Estimate:
    """A ratio of sums (seeds, documents) with its interval."""
    samples = bootstrap.samples(above[..., None], below[..., None])
    return _estimate(float(above.sum() / below.sum()), samples[:, 0], group, bootstrap)


def _estimate(
    value: float, samples: Array, group: Sequence[MechanismRecord], bootstrap: Bootstrap
) -> Estimate:
    first = group[0]
    low: float | None = None
    high: float | None = None
    if len(first.documents) > 1:
        low, high = (round(float(end[0]), 9) + 0.0 for end in bootstrap.interval(samples[:, None]))
    tokens = sum(first.windows) * first.length
    value = round(value, 9) + 0.0
    return Estimate(value, low, high, len(first.documents), tokens, len(group))


def _allowed(near: Array) -> NDArray[np.bool_]:
    """Per head, the bins that hold the cosines at L but for a share `TAIL` at either end."""
    shares = _cumulative(near.sum((0, 1)))
    before = np.concatenate((np.zeros((len(shares), 1)), shares[:, :-1]), axis=1)
    return np.asarray((shares > TAIL) & (before < 1 - TAIL))


def _quantiles(
    counts: Array, group: Sequence[MechanismRecord], bootstrap: Bootstrap
) -> tuple[Estimate, ...]:
    """Quantiles of the cosines, the mean over heads; counts are (seeds, documents, heads, bins)."""
    seeds, documents, heads, bins = counts.shape
    rising = counts.cumsum(-1).reshape(seeds, documents, -1)
    total = np.broadcast_to(counts.sum(-1, keepdims=True), counts.shape)
    samples = bootstrap.samples(rising, total.reshape(seeds, documents, -1))
    drawn = samples.reshape(-1, heads, bins)
    whole = _cumulative(counts.sum((0, 1)))
    return tuple(
        _estimate(
            float(_crossing(whole[None], share)[0].mean()),
            _crossing(drawn, share).mean(-1),
            group,
            bootstrap,
        )
        for share in QUANTILES
    )


def _cumulative(counts: Array) -> Array:
    return np.asarray(counts.cumsum(-1) / counts.sum(-1, keepdims=True))


def _crossing(shares: Array, wanted: float) -> Array:
    """Where cumulative shares (…, bins) over −1 … 1 cross `wanted`, linear within a bin."""
    bins = shares.shape[-1]
    index = np.minimum((shares < wanted).sum(-1), bins - 1)
    upper = np.take_along_axis(shares, index[..., None], -1)[..., 0]
    before = np.take_along_axis(shares, np.maximum(index - 1, 0)[..., None], -1)[..., 0]
    lower = np.where(index > 0, before, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        inside = np.where(upper > lower, (wanted - lower) / (upper - lower), 0.5)
    return np.asarray(-1 + 2 * (index + np.clip(inside, 0, 1)) / bins)


def _ends(group: Sequence[MechanismRecord], name: str) -> tuple[float, float]:
    ends = _stacked(group, name)
    return round(float(ends[..., 0].min()), 6), round(float(ends[..., 1].max()), 6)


def _markdown(
    rows: Sequence[MechanismRow],
    records: Sequence[MechanismRecord],
    diverged: Sequence[Divergence],
) -> str:
    first = rows[0]
    near, far = first.train_length, first.length
    head = (
        "score",
        "rank correlation",
        "heads + / − / all",
        "before the norm",
        "spread of ‖k‖",
        f"cosines at {near}",
        f"cosines at {far}",
        f"outside at {far}, %",
    )
    lines = [
        (
            row.variant,
            "one norm" if row.correlation is None else _shown(row.correlation),
            " / ".join(map(str, row.heads_clear)) if row.correlation else "–",
            _shown(row.raw_correlation),
            _shown(row.spread),
            f"{_shown(row.near[0])} to {_shown(row.near[-1])}",
            f"{_shown(row.far[0])} to {_shown(row.far[-1])}",
            _shown(row.outside),
        )
        for row in rows
    ]
    seeds = "; ".join(f"{row.variant}: {', '.join(map(str, row.seeds))}" for row in rows)
    parts = [
        "# Key norms, attention and cosines",
        f"Trained at {near} tokens, looked into on {len(records[0].documents)} held-out documents "
        f"({sum(records[0].windows)} texts of {far} tokens, and their first {near}). In brackets: "
        "95 % bootstrap intervals over documents, and over seeds where there are several. "
        f"Seeds: {seeds}.",
        grid(head, lines),
        "\n".join(
            (
                "- rank correlation: Spearman's, between ‖k_j‖ as the score sees it and the "
                "attention that",
                f"  key j receives from the next {max(1, near // 2)} queries relative to uniform "
                "attention, within a text; mean over",
                "  layers, heads and texts. heads + / −: those whose own interval lies above or "
                "below 0.",
                "- before the norm: the same with the key as it enters the score; a norm cannot "
                "hand it on.",
                "- spread: standard deviation of ‖k_j‖ over its mean, within a text.",
                f"- cosines: cos(q_i, k_j) as the score has them, from the {TAIL:.1%} to the "
                f"{1 - TAIL:.1%} quantile, mean over heads.",
                f"- outside: share of the pairs at {far} whose cosine lies outside that range of "
                f"its head at {near}",
                f"  (at {near} itself: {2 * TAIL:.1%} by definition, up to the width of a bin).",
            )
        ),
        *(f"{d.variant}, seed {d.seed}: diverged at step {d.step} in {d.where}." for d in diverged),
    ]
    return "\n\n".join(parts) + "\n"


def _shown(value: Estimate) -> str:
    if value.low is None or value.high is None:
        return f"{value.value:.2f} [no interval]"
    return f"{value.value:.2f} [{value.low:.2f}, {value.high:.2f}]"


def _csv(rows: Sequence[MechanismRow]) -> str:
    names = ["raw_correlation", "spread", "outside"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns: list[Mapping[str, Estimate | None]] = []
    for row in rows:
        values: dict[str, Estimate | None] = {"correlation": row.correlation}
        values |= {name: getattr(row, name) for name in names}
        for place in ("near", "far"):
            found = getattr(row, place)
            values |= {f"cosine_{place}_{q:g}": v for q, v in zip(QUANTILES, found, strict=True)}
        columns.append(values)
    head = [f"{name}{end}" for name in columns[0] for end in ("", "_low", "_high")]
    writer.writerow(("variant", "train_length", "length", "seeds", *head))
    for row, measured in zip(rows, columns, strict=True):
        numbers = [
            None if v is None else number
            for v in measured.values()
            for number in ((v.value, v.low, v.high) if v else (None, None, None))
        ]
        writer.writerow((row.variant, row.train_length, row.length, len(row.seeds), *numbers))
    return text.getvalue()


def _order(variant: str) -> tuple[int, str]:
    known = variant in VARIANT_ORDER
    return (VARIANT_ORDER.index(variant) if known else len(VARIANT_ORDER), variant)

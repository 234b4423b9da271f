"""The columns, claims and figures of the mechanism study."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product

import numpy as np
import polars as pl

from normattn.errors import InputError
from normattn.kernels.cosines import BINS
from normattn.lab.diagnostics.keys import FIRST, REGIONS, TAIL, trained_range
from normattn.lab.diagnostics.mechanism import READINGS
from normattn.lab.report.claims import Claim
from normattn.lab.report.figures import (
    Density,
    DensityRow,
    Figure,
    Grid,
    IntervalColumn,
    Intervals,
)
from normattn.lab.report.tables import NOTHING, Cell, Column, Row, shown_cell, text_column
from normattn.lab.report.view import View
from normattn.lab.stats import Metric
from normattn.lab.stats.metrics import Array, Value, crossing, mean
from normattn.lab.studies.lm_report import VARIANT_ORDER, ranked

KIND = "mechanism"
# What was measured

SOURCE, SOURCE_OPEN = "kexue 9859", "kexue 9859, left open"
QUANTILES = (TAIL, 0.25, 0.5, 0.75, 1 - TAIL)
CORRELATION = mean("correlation", "rank correlation")
RAW = mean("raw_correlation", "before the norm")
SPREAD = mean("spread", "spread of ‖k‖")
SIZE = mean("position_size", "size")


def lengths(view: View) -> tuple[int, int]:
    """The training length, and the longer one; `InputError` before any model was looked into."""
    measured = view.values("length", {"protocol": KIND})
    if not measured:
        raise InputError("there is nothing to report yet: no trained model was looked into")
    return min(measured), max(measured)


def rows(view: View, statistic: str | None = None) -> list[Row]:
    """The scores that were looked into, or those of which a statistic was measured."""
    chosen = {"protocol": KIND} | ({} if statistic is None else {"statistic": statistic})
    return [Row(name, {"row": name}) for name in ranked(view.values("row", chosen), VARIANT_ORDER)]


def where(view: View, **more: object) -> dict[str, object]:
    """Where the measurements at the training length are; `more` overrides and adds columns."""
    return {"protocol": KIND, "length": lengths(view)[0], "factor.received": None, **more}


def _per_bin(
    name: str,
    bins: int,
    value: Callable[[Array, Array], Array],
    unit: str = "",
    digits: int = 2,
) -> Metric:
    """A number made of (sums, counts), each (…, `bins` of an axis), added over layers and heads."""

    def whole(above: Array, below: Array, *rest: Array) -> Array:
        parts = (x.reshape(*x.shape[:-1], -1, bins).sum(-2) for x in (above, below))
        return np.asarray(value(*parts))

    return Metric(name, "", whole, unit, digits)


def _share(part: Array, whole: Array) -> Array:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(whole > 0, part / whole, np.nan)


# Norms and cosines


def columns(view: View) -> Sequence[Column]:
    """Correlations, the spread of norms, the range of cosines at both lengths."""
    near, far = lengths(view)
    at = where(view)
    correlation = Column("correlation", CORRELATION.title, CORRELATION.at(at), without="one norm")
    return [
        correlation,
        text_column(
            "heads", "heads + / − / all", lambda view, row: heads(view, row, "correlation")
        ),
        Column("raw_correlation", RAW.title, RAW.at(at)),
        Column("spread", SPREAD.title, SPREAD.at(at)),
        *_cosine_columns(view, "near", near),
        text_column("ends_near", f"least, largest at {near:,}", _ends(near)),
        *_cosine_columns(view, "far", far),
        text_column("ends_far", f"least, largest at {far:,}", _ends(far)),
        Column("outside", f"outside at {far:,}, %", plain=_outside),
    ]


def heads(view: View, row: Row, statistic: str, each_seed: bool = False) -> str | None:
    """Heads whose own interval lies above 0, below 0, and all of them.

    Heads of each trained model with `each_seed`, else those of all seeds together.
    """
    at = {**row.where, **where(view)}
    sums = view.sums(statistic, at)
    if sums is None or not sums.denominator.any():
        return None
    seeds: list[dict[str, object]] = [{"seed": seed} for seed in sums.seeds] if each_seed else [{}]
    only = mean(statistic, "")
    own = [
        view.estimate(only, {**at, **seed, "layer": layer, "head": head})
        for seed in seeds
        for layer, head, *_ in sums.bins
    ]
    above = sum(head is not None and head.above_zero for head in own)
    below = sum(head is not None and head.below_zero for head in own)
    return f"{above} / {below} / {len(own)}"


def _cosine_columns(view: View, key: str, length: int) -> list[Column]:
    """The quantiles of the cosines at a length."""
    return [
        Column(
            f"cosine_{key}_{share:g}",
            f"cosine, {share:.1%} at {length:,}",
            _cosine_quantile(share).at(where(view, length=length)),
        )
        for share in QUANTILES
    ]


@cache
def _cosine_quantile(share: float) -> Metric:
    """A quantile of the cosines, the mean over heads."""

    def value(above: Array, below: Array, *whole: Array) -> Array:
        by_head = above.reshape(*above.shape[:-1], -1, BINS)
        return np.asarray(crossing(by_head, share, (-1.0, 1.0)).mean(-1))

    return Metric("cosine", "cosine", value, "", 2)


def _ends(length: int) -> Callable[[View, Row], str | None]:
    def text(view: View, row: Row) -> str | None:
        chosen = view.frame.filter(row=row.where["row"], length=length, protocol=KIND)
        least = chosen.filter(statistic="least_cosine")["sum"].to_list()
        largest = chosen.filter(statistic="largest_cosine")["sum"].to_list()
        return f"{min(least):.2f}, {max(largest):.2f}" if least else None

    return text


def _outside(view: View, row: Row) -> Cell:
    """The share (%) of cosines in bins that hold none of the cosines at L, but for their tails.

    Each seed is a model with a range of its own.
    """
    far = lengths(view)[1]
    at_l = view.sums("cosine", {**row.where, **where(view)})
    if at_l is None or view.sums("cosine", {**row.where, **where(view, length=far)}) is None:
        return NOTHING
    counts = at_l.numerator.sum(1)
    allowed = np.stack([trained_range(seed.reshape(-1, BINS)).reshape(-1) for seed in counts])

    def value(above: Array, below: Array, *whole: Array) -> Array:
        return np.asarray(100 * np.where(allowed, 0.0, above).sum(-1) / above.sum(-1))

    metric = Metric("cosine", "outside", value, "%", 2)
    estimate = view.estimate(metric, {**row.where, **where(view, length=far)})
    return NOTHING if estimate is None else shown_cell(estimate, metric)


# Norms and positions


def position_columns(view: View) -> list[Column]:
    """What ‖k_j‖ says of j: the key as the score sees it, and before any norm."""
    made, at = [], where(view)
    for side, said in (("", "as the score sees it"), ("raw_", "raw")):
        position, first = f"{side}position", f"{side}first_norms"
        one, more = (Metric(first, "", _of_first(p)) for p in (slice(1), slice(1, None)))
        title, size = f"rank correlation, {said}", mean(f"{side}position_size", "")
        made += [
            Column(position, title, mean(position, "").at(at), without="one norm"),
            text_column(f"{position}_heads", f"heads + / − / all, {said}", _heads_of(position)),
            Column(f"{position}_size", f"size, {said}", size.at(at)),
            Column(f"{side}first_key", f"first key, {said}", one.at(at)),
            Column(f"{side}next_keys", f"next {FIRST - 1}, {said}", more.at(at)),
        ]
    return made


def _heads_of(statistic: str) -> Callable[[View, Row], str | None]:
    return lambda view, row: heads(view, row, statistic, each_seed=True)


def _of_first(chosen: slice) -> Value:
    """The mean over texts, heads and the `chosen` of the first keys."""

    def value(above: Array, below: Array, *whole: Array) -> Array:
        parts = (x.reshape(*x.shape[:-1], -1, FIRST)[..., chosen] for x in (above, below))
        total, count = (part.sum((-2, -1)) for part in parts)
        return np.asarray(total / count)

    return value


# Unseen positions


def _out_of_range(far: int) -> Callable[[Array, Array], Array]:
    """The share (%) outside the range of the pairs nearer than L (0) or further (1)."""
    return lambda above, _: (
        100 * _share(above[..., 2 * far + 1], above[..., 2 * far] + above[..., 2 * far + 1])
    )


NEAR, FAR = (_per_bin("pairs", len(REGIONS), _out_of_range(far), "%") for far in (0, 1))
FURTHER = _per_bin(
    "pairs", len(REGIONS), lambda *both: _out_of_range(1)(*both) - _out_of_range(0)(*both), "%"
)


def _attention(region: str) -> Metric:
    index = REGIONS.index(region)
    return _per_bin("attention", len(REGIONS), lambda *both: 100 * _share(*both)[..., index], "%")


def _reading(name: str, ours: str, theirs: str | None = None) -> Metric:
    """Of the last L tokens in one reading, or less that in another: in %, a loss in nats."""
    first, second = (READINGS.index(reading or ours) for reading in (ours, theirs))
    scale, unit, digits = (100, "%", 2) if name == "last_accuracy" else (1, "nats", 3)

    def value(above: Array, below: Array) -> Array:
        read = scale * _share(above, below)
        return read[..., first] if theirs is None else read[..., first] - read[..., second]

    return _per_bin(name, len(READINGS), value, unit, digits)


def range_columns(view: View) -> Sequence[Column]:
    """Pairs and attention outside the trained range, by distance."""
    longer = where(view, length=lengths(view)[1])
    return [
        Column(key, title, metric.at(longer))
        for key, title, metric in (
            ("near_outside", "pairs nearer than L, outside, %", NEAR),
            ("far_outside", "pairs further, outside, %", FAR),
            ("further", "difference", FURTHER),
            ("near_attention", "attention nearer, outside, %", _attention("near outside")),
            ("far_attention", "attention further, outside, %", _attention("far outside")),
            ("far_inside", "attention further, inside, %", _attention("far inside")),
        )
    ]


def clamped_columns(view: View) -> Iterator[Column]:
    """The last tokens alone, behind the whole text, and with clamped positions."""
    longer = where(view, length=lengths(view)[1])
    alone: list[tuple[str, str | None]] = [(reading, None) for reading in READINGS]
    for name, said in (("last_accuracy", "accuracy"), ("last_loss", "loss")):
        for ours, theirs in (*alone, ("as is", "alone"), ("clamped", "as is")):
            title = f"{said}, {ours}" + (f" − {theirs}" if theirs else "")
            key = f"{said}_{ours}" + (f"_less_{theirs}" if theirs else "")
            yield Column(key.replace(" ", "_"), title, _reading(name, ours, theirs).at(longer))


# Claims and figures

WIDENED = " (KeyNorm widens what is trained, so they should not)"


def claims(view: View) -> Iterator[Claim]:
    """The source's explanation, sentence by sentence, then what it leaves open."""
    near, far = lengths(view)
    highest, baseline = _cosine_quantile(1 - TAIL), where(view, row="Baseline")
    yield Claim(
        "without a norm a key's size decides how much attention it receives",
        CORRELATION.at(baseline),
        *(SOURCE, "Baseline: rank correlation of ‖k‖ and attention received"),
    )
    for row, remark in (("Baseline", ""), ("KNA", WIDENED), ("KNA-NoPE", WIDENED)):
        yield Claim(
            f"on longer text {row}'s cosines reach further{remark}",
            highest.at(where(view, row=row, length=far)) - highest.at(where(view, row=row)),
            *(SOURCE, f"{row}: {1 - TAIL:.1%} quantile of cos(q, k), at {far:,} − at {near:,}"),
        )
    yield Claim(
        "KeyNorm widens the range of cosines that training reaches",
        highest.at(where(view, row="KNA")) - highest.at(baseline),
        *(SOURCE, f"{1 - TAIL:.1%} quantile at {near:,}: KNA − Baseline"),
    )
    counted = heads(view, Row("", {"row": "Baseline"}), "position", each_seed=True)
    yield Claim(
        "a key's norm carries its position, whichever way",
        SIZE.at(baseline),
        SOURCE_OPEN,
        f"Baseline: rank correlation of ‖k‖ and its position, its size (heads + / − / all: "
        f"{counted})",
    )
    for sentence, measured, metric in (
        (
            "{}'s cosines leave their trained range at unseen distances rather than at trained "
            "ones",
            f"share of pairs outside, at i − j ≥ {near:,} − nearer",
            FURTHER,
        ),
        (
            "unseen positions cost {} accuracy on longer text",
            f"accuracy of the last {near:,} of {far:,} tokens, positions clamped − as is",
            _reading("last_accuracy", "clamped", "as is"),
        ),
    ):
        for row in ("Baseline", "KNA"):
            yield Claim(
                sentence.format(row),
                metric.at(where(view, row=row, length=far)),
                *(SOURCE_OPEN, f"{row}: {measured}"),
            )


def figures(view: View) -> list[Figure]:
    """Norms against attention, cosines at both lengths, their quantiles, the last tokens."""
    near, far = lengths(view)
    scores = rows(view)
    at_both = [_cosine_columns(view, "", length) for length in (near, far)]
    ranges = Intervals(
        "cosine_ranges",
        "Quantiles of cos(q, k) by length of the text, mean over heads",
        tuple(f"{row.label}, {length:,}" for row in scores for length in (near, far)),
        tuple(
            IntervalColumn(
                f"{share:.1%}",
                tuple(c.cell(view, row).estimate for row in scores for c in columns),
            )
            for share, *columns in zip(QUANTILES, *at_both, strict=True)
        ),
    )
    return [_norms(view), ranges, _densities(view), *_last_tokens(view)]


def _densities(view: View) -> Figure:
    """The cosines of all heads, at both lengths."""
    near, far = lengths(view)
    lines = []
    for row in rows(view):
        heights = []
        for length in (near, far):
            sums = view.sums("cosine", {**row.where, **where(view, length=length)})
            if sums is not None:
                counts = sums.numerator.sum((0, 1)).reshape(-1, BINS).sum(0)
                heights.append(tuple(float(v) for v in counts / counts.sum()))
        lines.append(DensityRow(row.label, -1.0, 1.0, tuple(heights), (f"{near:,}", f"{far:,}")))
    title = f"Cosines at {near:,} and at {far:,} tokens, all heads"
    return Density("cosines", title, tuple(lines), "cos(q, k)")


def _norms(view: View) -> Figure:
    """The share of keys by their norm, and the mean attention that keys of that norm receive."""
    labels, values, edges = [], [], list[float]()
    received = (pl.col("factor.received") * pl.col("sum")).sum() / pl.col("sum").sum()
    for row in rows(view):
        chosen = view.frame.filter(row=row.where["row"], statistic="density")
        table = chosen.group_by("bin").agg(received.alias("mean"), pl.col("sum").sum()).sort("bin")
        edges = table["bin"].to_list()
        total = float(table["sum"].sum()) or 1.0
        line = [m if n / total > 1e-4 else None for m, n in table.select("mean", "sum").rows()]
        labels.append(row.label)
        values.append(tuple(None if v is None or not np.isfinite(v) else v for v in line))
    return Grid(
        "key_norms_and_attention",
        "Attention received (log2 over uniform) by the key's norm",
        tuple(labels),
        tuple(f"{2**edge:.2f}" for edge in edges),
        tuple(values),
        tuple(("",) * len(line) for line in values),
        x_title="‖k‖ over the text's mean",
        scale_title="mean log2 of attention received over uniform",
    )


def _last_tokens(view: View) -> Iterator[Figure]:
    """The accuracy of the last tokens in every reading; none where it was not measured."""
    near, far = lengths(view)
    known = {}
    for row, reading in product(rows(view, "last_accuracy"), READINGS):
        metric = _reading("last_accuracy", reading).at(where(view, length=far))
        estimate = view.known(metric, row.where)
        if estimate is not None:
            known[f"{row.label}, {reading}"] = estimate
    if known:
        title = f"The last {near:,} of {far:,} tokens"
        accuracy = IntervalColumn("accuracy, %", tuple(known.values()))
        yield Intervals("last_accuracy", title, tuple(known), (accuracy,))

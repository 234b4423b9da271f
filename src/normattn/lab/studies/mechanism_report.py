"""Metrics, tables, claims and figures of the study `mechanism`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise, product

import numpy as np

from normattn.errors import InputError
from normattn.kernels.cosines import BINS
from normattn.lab.diagnostics.keys import REGIONS, TAIL
from normattn.lab.diagnostics.mechanism import READINGS
from normattn.lab.report.claims import Claim
from normattn.lab.report.figures import (
    Curves,
    Figure,
    IntervalColumn,
    Intervals,
    Line,
    Mark,
    Panel,
    Point,
)
from normattn.lab.report.tables import Column, Row
from normattn.lab.report.view import View
from normattn.lab.stats import Metric
from normattn.lab.stats.arrays import Array
from normattn.lab.stats.metrics import crossing, mean
from normattn.lab.studies.lm_report import VARIANT_ORDER, ranked

KIND = "mechanism"

# Metrics

SOURCE, SOURCE_OPEN = "kexue 9859", "kexue 9859, left open"
QUANTILES = (TAIL, 0.25, 0.5, 0.75, 1 - TAIL)
CORRELATION = mean("correlation", "rank correlation")
DIRECTION = mean("mean_direction", "energy in the mean key, %", scale=100.0)
PRODUCT = mean("product", "mean q · k")


def lengths(view: View) -> tuple[int, int]:
    """The training length, and the longer one; `InputError` where no model was measured."""
    measured = view.values("length", {"protocol": KIND})
    if not measured:
        raise InputError("there is nothing to report yet: no trained model was measured")
    return min(measured), max(measured)


def rows(view: View, statistic: str | None = None) -> list[Row]:
    """The scores that were measured, or those of which a statistic was."""
    chosen = {"protocol": KIND} | ({} if statistic is None else {"statistic": statistic})
    return [Row(name, {"row": name}) for name in ranked(view.values("row", chosen), VARIANT_ORDER)]


def where(view: View, **more: object) -> dict[str, object]:
    """Where the measurements at the training length are; `more` overrides and adds columns."""
    return {"protocol": KIND, "length": lengths(view)[0], **more}


@cache
def cosine_quantile(share: float) -> Metric:
    """A quantile of the cosines, the mean over heads."""

    def value(above: Array, below: Array, *whole: Array) -> Array:
        by_head = above.reshape(*above.shape[:-1], -1, BINS)
        return np.asarray(crossing(by_head, share, (-1.0, 1.0)).mean(-1))

    return Metric("cosine", "cosine", value, "", 2)


def _per_bin(
    name: str, bins: int, value: Callable[[Array, Array], Array], unit: str = "%", digits: int = 2
) -> Metric:
    """A number made of (sums, counts), each (…, `bins` of an axis), added over layers and heads."""

    def whole(above: Array, below: Array, *rest: Array) -> Array:
        parts = (x.reshape(*x.shape[:-1], -1, bins).sum(-2) for x in (above, below))
        return np.asarray(value(*parts))

    return Metric(name, "", whole, unit, digits)


def _share(part: Array, whole: Array) -> Array:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(whole > 0, part / whole, np.nan)


def _out_of_range(far: int, pairs: Array) -> Array:
    """The share (%) outside the range, of the pairs nearer than L (0) or further (1)."""
    inside, outside = pairs[..., 2 * far], pairs[..., 2 * far + 1]
    return 100 * _share(outside, inside + outside)


NEAR, FAR, FURTHER = (
    _per_bin("pairs", len(REGIONS), value)
    for value in (
        lambda pairs, _: _out_of_range(0, pairs),
        lambda pairs, _: _out_of_range(1, pairs),
        lambda pairs, _: _out_of_range(1, pairs) - _out_of_range(0, pairs),
    )
)


def _attention(region: str) -> Metric:
    index = REGIONS.index(region)
    return _per_bin("attention", len(REGIONS), lambda *both: 100 * _share(*both)[..., index])


def last_tokens(name: str, ours: str, theirs: str | None = None) -> Metric:
    """Of the last L tokens in one reading, or less that in another: in %, a loss in nats."""
    first, second = (READINGS.index(reading or ours) for reading in (ours, theirs))
    scale, unit, digits = (100, "%", 2) if name == "last_accuracy" else (1, "nats", 3)

    def value(above: Array, below: Array) -> Array:
        read = scale * _share(above, below)
        return read[..., first] if theirs is None else read[..., first] - read[..., second]

    return _per_bin(name, len(READINGS), value, unit, digits)


def recovered(above: Array, below: Array, *whole: Array) -> Array:
    """Of the accuracy that a longer context costs, the share that clamped positions recover."""
    read = _share(above, below).reshape(*above.shape[:-1], -1, len(READINGS)).sum(-2)
    alone, unmodified, clamped = (read[..., n] for n in range(len(READINGS)))
    return _share(clamped - unmodified, alone - unmodified)


RECOVERED = Metric("last_accuracy", "share recovered", recovered, "", 2)


def product_between(low: int, high: int) -> Metric:
    """q_i · k_j before biases, the mean over pairs at these distances, layers and heads."""
    return PRODUCT.between((float(low), float(high)))


# Columns


def columns(view: View) -> list[Column]:
    """Correlations, the spread of norms, the range of cosines at both lengths."""
    (near, far), at = lengths(view), where(view)
    return [
        Column("correlation", CORRELATION.title, CORRELATION.at(at), without="one norm"),
        Column("raw_correlation", "before the norm", mean("raw_correlation", "").at(at)),
        Column("spread", "spread of ‖k‖", mean("spread", "").at(at)),
        *(
            [Column("mean_direction", DIRECTION.title, DIRECTION.at(at))]
            if rows(view, "mean_direction")
            else []
        ),
        *_cosine_columns(view, "near", near),
        *_cosine_columns(view, "far", far),
    ]


def _cosine_columns(view: View, key: str, length: int) -> list[Column]:
    return [
        Column(
            f"cosine_{key}_{share:g}",
            f"cosine, {share:.1%} at {length:,}",
            cosine_quantile(share).at(where(view, length=length)),
        )
        for share in QUANTILES
    ]


def range_columns(view: View) -> list[Column]:
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
    ] + [_beyond(view)]


def distance_bins(view: View) -> list[tuple[int, int]]:
    """The octaves of distance over which products were measured."""
    chosen = {"protocol": KIND, "statistic": "product"}
    edges = {*view.values("bin", chosen), *view.values("bin_end", chosen)}
    return list(pairwise(sorted(map(int, edges))))


def profile_columns(view: View) -> list[Column]:
    """The mean product by octave of distance, and how far it comes back beyond L."""
    near, far = lengths(view)
    longer = where(view, length=far)
    beyond = product_between(near, far) - product_between(near // 2, near)
    return [
        *(
            Column(
                f"product_{low}",
                f"{low:,} … {high - 1:,}" if high - low > 1 else str(low),
                product_between(low, high).at(longer),
            )
            for low, high in distance_bins(view)
        ),
        Column("rebound", "beyond L − the octave before", beyond.at(longer)),
    ]


def layer_rows(view: View) -> list[Row]:
    """Every layer of every score."""
    return [
        Row(f"{row.label}, layer {layer + 1}", {**row.where, "layer": layer})
        for row in rows(view, "attention")
        for layer in view.values("layer", {"protocol": KIND, **row.where, "statistic": "attention"})
    ]


def layer_columns(view: View) -> list[Column]:
    """Attention at distances of at least L, of the queries that see such distances."""
    return [_beyond(view)]


def _beyond(view: View) -> Column:
    """Attention to both far regions together."""
    metric = _per_bin("attention", len(REGIONS), lambda *both: 100 * _share(*both)[..., 2:].sum(-1))
    longer = where(view, length=lengths(view)[1])
    return Column("beyond", "attention beyond L, %", metric.at(longer))


def clamped_columns(view: View) -> list[Column]:
    """The last tokens alone, behind the whole text, and with clamped positions."""
    longer = where(view, length=lengths(view)[1])
    read = [(name, None) for name in READINGS] + [
        ("unmodified", "alone"),
        ("clamped", "unmodified"),
    ]
    return [
        Column(
            f"{name}_{ours}{f'_less_{theirs}' if theirs else ''}",
            f"{title}, {ours}{f' − {theirs}' if theirs else ''}",
            last_tokens(f"last_{name}", ours, theirs).at(longer),
        )
        for name, title in (("accuracy", "accuracy"), ("loss", "loss"))
        for ours, theirs in read
    ] + [Column("recovered", RECOVERED.title, RECOVERED.at(longer))]


# Claims and figures

WIDENED = " (KeyNorm widens what is trained, so they should not)"


def claims(view: View) -> Iterator[Claim]:
    """The source's explanation, sentence by sentence, then what it leaves open."""
    near, far = lengths(view)
    highest, baseline = cosine_quantile(1 - TAIL), where(view, row="Baseline")
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
    yield Claim(
        "a key's norm carries its position, whichever way",
        mean("position_size", "size").at(baseline),
        *(SOURCE_OPEN, "Baseline: rank correlation of ‖k‖ and its position, its size"),
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
            f"share of the accuracy lost at {far:,} tokens that clamped positions recover",
            RECOVERED,
        ),
    ):
        for row in ("Baseline", "KNA"):
            yield Claim(
                sentence.format(row),
                metric.at(where(view, row=row, length=far)),
                *(SOURCE_OPEN, f"{row}: {measured}"),
            )


def figures(view: View) -> list[Figure]:
    """The last tokens, and quantiles of the cosines at both lengths."""
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
    return [*_last_tokens(view), ranges, *_profile(view)]


def _profile(view: View) -> Iterator[Figure]:
    """The mean product by distance, a line for each score; none where it was not measured."""
    near, far = lengths(view)
    lines = []
    for row in rows(view, "product"):
        at = where(view, length=far, **row.where)
        read = [
            (low, view.known(product_between(low, high), at)) for low, high in distance_bins(view)
        ]
        # The axis begins at a quarter of L.
        points = tuple(
            Point.of(float(low), value) for low, value in read if value and low >= near // 4
        )
        lines.append(Line(row.label, points))
    if lines:
        panel = Panel(
            *("", tuple(lines), "distance i − j", PRODUCT.title),
            log_x=True,
            marks=(Mark(float(near), "L"),),
        )
        yield Curves("product_by_distance", "Mean of q · k by distance", (panel,))


def _last_tokens(view: View) -> Iterator[Figure]:
    """The accuracy of the last tokens in every reading; none where it was not measured."""
    near, far = lengths(view)
    known = {}
    for row, reading in product(rows(view, "last_accuracy"), READINGS):
        metric = last_tokens("last_accuracy", reading).at(where(view, length=far))
        estimate = view.known(metric, row.where)
        if estimate is not None:
            known[f"{row.label}, {reading}"] = estimate
    if known:
        title = f"The last {near:,} of {far:,} tokens"
        accuracy = IntervalColumn("accuracy, %", tuple(known.values()))
        yield Intervals("last_accuracy", title, tuple(known), (accuracy,))

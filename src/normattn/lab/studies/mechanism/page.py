"""The page of the mechanism study: its table, and what the source says of norms and cosines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from normattn.lab.diagnostics.ranges import TAIL
from normattn.lab.report.claim import Claim
from normattn.lab.report.page import Page
from normattn.lab.report.table import NOTHING, Cell, Column, Row, Table, shown
from normattn.lab.report.view import View
from normattn.lab.studies.mechanism import positions, unseen
from normattn.lab.studies.mechanism.figures import figures
from normattn.lab.studies.mechanism.measured import (
    CORRELATION,
    RAW,
    SPREAD,
    cosine_columns,
    cosine_quantile,
    lengths,
    outside,
    rows,
    where,
)

SOURCE = "kexue 9859"


def columns(view: View) -> Sequence[Column]:
    """Correlations, the spread of norms, the range of cosines at both lengths."""
    near, far = lengths(view)
    at = where(view)
    return [
        Column("correlation", CORRELATION.title, plain=_correlation),
        Column("heads", "heads + / − / all", plain=_heads),
        Column("raw_correlation", RAW.title, RAW.at(at)),
        Column("spread", SPREAD.title, SPREAD.at(at)),
        *cosine_columns(view, "near", near),
        Column("ends_near", f"least, largest at {near:,}", plain=_ends(near)),
        *cosine_columns(view, "far", far),
        Column("ends_far", f"least, largest at {far:,}", plain=_ends(far)),
        Column("outside", f"outside at {far:,}, %", plain=_outside),
    ]


def _correlation(view: View, row: Row) -> Cell:
    at = {**row.where, **where(view)}
    sums = view.sums(CORRELATION.name, at)
    if sums is None:
        return NOTHING
    if not sums.denominator.any():
        return Cell("one norm")
    correlation = view.estimate(CORRELATION, at)
    return Cell(shown(correlation, 2), correlation)


def _heads(view: View, row: Row) -> Cell:
    """Heads whose own interval lies above 0, below 0, and how many there are."""
    at = {**row.where, **where(view)}
    sums = view.sums(CORRELATION.name, at)
    if sums is None or not sums.denominator.any():
        return NOTHING
    estimates = [
        view.estimate(CORRELATION, {**at, "layer": layer, "head": head})
        for layer, head, _, _ in sums.bins
    ]
    above = sum(head is not None and head.above_zero for head in estimates)
    below = sum(head is not None and head.below_zero for head in estimates)
    return Cell(f"{above} / {below} / {len(estimates)}")


def _ends(length: int) -> Callable[[View, Row], Cell]:
    def cell(view: View, row: Row) -> Cell:
        chosen = view.frame.filter(row=row.where["row"], length=length, protocol="mechanism")
        least = chosen.filter(statistic="least_cosine")["sum"].to_list()
        largest = chosen.filter(statistic="largest_cosine")["sum"].to_list()
        return Cell(f"{min(least):.2f}, {max(largest):.2f}" if least else "–")

    return cell


def _outside(view: View, row: Row) -> Cell:
    near, far = (view.sums("cosine", {**row.where, **where(view, length=n)}) for n in lengths(view))
    if near is None or far is None:
        return NOTHING
    statistic = outside(near)
    estimate = view.estimate(statistic, {**row.where, **where(view, length=lengths(view)[1])})
    return Cell(shown(estimate, 2), estimate)


WIDENED = " (KeyNorm widens what is trained, so they should not)"


def claims(view: View) -> list[Claim]:
    """The source's explanation, sentence by sentence."""
    near, far = lengths(view)
    highest, baseline = cosine_quantile(1 - TAIL), where(view, row="Baseline")
    decides = Claim(
        "without a norm a key's size decides how much attention it receives",
        CORRELATION.at(baseline),
        *(SOURCE, "Baseline: rank correlation of ‖k‖ and attention received"),
    )
    further = [
        Claim(
            f"on longer text {row}'s cosines reach further{remark}",
            highest.at(where(view, row=row, length=far)) - highest.at(where(view, row=row)),
            *(SOURCE, f"{row}: {1 - TAIL:.1%} quantile of cos(q, k), at {far:,} − at {near:,}"),
        )
        for row, remark in (("Baseline", ""), ("KNA", WIDENED), ("KNA-NoPE", WIDENED))
    ]
    widens = Claim(
        "KeyNorm widens the range of cosines that training reaches",
        highest.at(where(view, row="KNA")) - highest.at(baseline),
        *(SOURCE, f"{1 - TAIL:.1%} quantile at {near:,}: KNA − Baseline"),
    )
    return [decides, *further, widens, *positions.claims(view), *unseen.claims(view)]


PAGE = Page(
    title="Key norms, attention and cosines",
    question="Does a key's norm decide how much attention it receives, and do cosines leave their "
    "trained range on longer text?",
    sources=("kexue.fm/archives/9859",),
    tables=(
        Table(
            "table",
            "",
            rows,
            columns,
            notes=(
                "rank correlation: Spearman's, between ‖k_j‖ as the score sees it and the "
                "attention that key j receives from the next L/2 queries relative to uniform "
                "attention, within a text; mean over layers, heads and texts. heads + / −: those "
                "whose own interval lies above or below 0.",
                "before the norm: the same with the key as it enters the score; a norm cannot hand "
                "it on.",
                "spread: standard deviation of ‖k_j‖ over its mean, within a text.",
                "cosine: cos(q_i, k_j) as the score has them, quantiles, mean over heads; least "
                "and largest of all heads.",
                f"outside: share of the pairs at the longer length whose cosine lies outside the "
                f"range of its head at L ({TAIL:.1%} left out at either end).",
            ),
        ),
        positions.table(),
        *unseen.tables(),
    ),
    claims=claims,
    figures=figures,
)

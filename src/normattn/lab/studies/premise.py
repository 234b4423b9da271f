"""Whether a comparison past L means something: are the scores equally good at L, do they copy?

A difference past the training length speaks of extrapolation only between models that are equally
good at it, and a model that uses no far context has little to lose. Both are computed from the
measurements and stand below the table as sentences, whichever way they come out.

*Equally good*: the 95 % interval of every score's accuracy at L minus Baseline's lies within ±1
point. *Copying is learned*: tokens within L whose answer stands in the context (tiled text) are
predicted at least ten points better than natural text of the same positions. development/log.md
has that rule from before the trainings of the preset `workstation`. Rows beside the source's scores
are controls: they differ from Baseline by design, at L too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from normattn.lab.report.tables import shown
from normattn.lab.report.view import View
from normattn.lab.stats import Estimate, contrast
from normattn.lab.studies.lm_report import (
    ACCURACY,
    AT_L,
    SEEN,
    TRAINED,
    VARIANT_ORDER,
    ranked,
)

EQUAL = 1.0
"""Points at L within which two scores count as equally good."""
COPIES = 10.0
"""Points that tiled text must be above natural text for copying to count as learned."""
LISTED = 8
"""Rows that a sentence names; of more it names the ends."""


def premise(view: View, copiers: Sequence[str] | None = None) -> list[str]:
    """What these measurements say of equal accuracy at L, and of copying.

    `copiers`: the rows of which it says whether they copy (default the source's scores).
    """
    sentences = []
    if differences := at_training_length(view):
        sentences.append(_equally_good(differences))
    if measured := copying(view, copiers):
        sentences.append(_copying(measured))
    return sentences


def at_training_length(view: View) -> dict[str, Estimate]:
    """Every other row's accuracy at L minus Baseline's, in points, as they were trained."""
    differences = {
        row: view.estimate(AT_L.at(variant=row) - AT_L.at(variant="Baseline"))
        for row in _rows(view)
        if row != "Baseline"
    }
    return {row: known for row, known in differences.items() if known is not None}


def copying(view: View, rows: Sequence[str] | None = None) -> dict[str, Estimate]:
    """Of every row, tokens within L whose answer stands in the context minus natural text.

    Both as trained, in points, over the same positions of the longest texts.
    """
    measured = {row: _copied(view, row) for row in rows or _rows(view)}
    return {row: known for row, known in measured.items() if known is not None}


def _equally_good(differences: Mapping[str, Estimate]) -> str:
    apart = {
        row: known
        for row, known in differences.items()
        if known.low is None or known.high is None or max(-known.low, known.high) > EQUAL
    }
    verdict = (
        "Whether the premise is met cannot be told: at L these scores may differ from Baseline "
        "by more than a point"
    )
    if not apart:
        verdict = "The premise is met: at L every other score is within a point of Baseline"
    elif any((e.low or 0.0) > EQUAL or (e.high or 0.0) < -EQUAL for e in differences.values()):
        verdict = "The premise is not met: the scores are not equally good at L"
    values = _listed(apart or differences)
    return f"{verdict}. Accuracy at L minus Baseline's, in points: {values}."


def _copying(measured: Mapping[str, Estimate]) -> str:
    learned = [row for row, known in measured.items() if known.value >= COPIES]
    others = len(measured) - len(learned)
    verdict = "Copying is learned by every score"
    if not learned:
        verdict = (
            "Copying is not learned by any score, so nothing about repeated text or about the "
            "use of far context follows from these models"
        )
    elif others:
        verdict = (
            f"Copying is learned by {', '.join(learned)} and not by the other {others}, so "
            "these rows differ in more than how they extrapolate"
        )
    return (
        f"{verdict}. Within L, tokens whose answer stands in the context (tiled text) minus "
        f"natural text at the same positions, in points, where a mean of {COPIES:.0f} counts as "
        f"learned: {_listed(measured)}."
    )


def _rows(view: View) -> list[str]:
    """The source's scores; where Baseline is the only one of them, every row."""
    rows = ranked(view.values("row", TRAINED), VARIANT_ORDER)
    compared = [row for row in rows if row in VARIANT_ORDER]
    return compared if len(compared) > 1 else rows


def _copied(view: View, row: str) -> Estimate | None:
    lengths = [view.longest(protocol) for protocol in ("repeated", "non_repeated")]
    within = view.one("train_length", {**TRAINED, "row": row})
    if None in lengths or lengths[0] != lengths[1] or within is None:
        return None
    where = {"row": row, "method": "", "length": lengths[0]}
    tiled = view.sums(SEEN.name, {**where, "protocol": "repeated"})
    natural = view.sums(ACCURACY.name, {**where, "protocol": "non_repeated"})
    if tiled is None or natural is None:
        return None
    counted = tiled.denominator.sum((0, 1)) > 0
    # From half of L on: the shortest segment is half as long as L.
    bins = [n for n, (*_, end) in enumerate(tiled.bins) if end <= within and counted[n]]
    if not bins or [natural.bins[n] for n in bins] != [tiled.bins[n] for n in bins]:
        return None
    # Few documents are read in both ways; drawn together, each counts where it was read.
    units = tuple(sorted({*tiled.units, *natural.units}))
    terms = [(1.0, tiled.at(bins).over(units)), (-1.0, natural.at(bins).over(units))]
    return contrast(terms, ACCURACY.value, view.bootstrap)


def _listed(estimates: Mapping[str, Estimate]) -> str:
    """Every row, or the lowest and the highest of many."""
    rows = list(estimates)
    if len(rows) > LISTED:
        rows.sort(key=lambda row: estimates[row].value)
        rows = [rows[0], rows[-1]]
    values = ", ".join(f"{row} {shown(estimates[row], 1, signed=True)}" for row in rows)
    return values if len(rows) == len(estimates) else f"of {len(estimates)} from {values}"

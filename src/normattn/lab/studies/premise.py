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

import math
from collections.abc import Iterator, Sequence

from normattn.lab.report.tables import shown
from normattn.lab.report.view import View
from normattn.lab.stats import Estimate, contrast, select
from normattn.lab.studies import preset
from normattn.lab.studies.lm_report import ACCURACY, SEEN, TRAINED, VARIANT_ORDER, ranked
from normattn.score.parts.rope_scaling import YaRN

EQUAL = 1.0
"""Points at L within which two scores count as equally good."""
COPIES = 10.0
"""Points that tiled text must be above natural text for copying to count as learned."""
LISTED = 8
"""Rows that a sentence names; of more it names the ends."""
LONGER = "workstation"
"""The preset whose trainings of the source's architecture are longer than a laptop's."""


def premise(view: View, copiers: Sequence[str] | None = None) -> list[str]:
    """The sentences that these measurements can tell.

    `copiers`: the rows of which it says whether they copy (default the source's scores).
    """
    return [*_equally_good(view), *_copying(view, copiers), *_yarns_ramp(view), *_longer(view)]


def at_training_length(view: View) -> dict[str, Estimate]:
    """Every other row's accuracy at L minus Baseline's, in points, as they were trained."""
    at_l = ACCURACY.at(TRAINED)
    differences = {
        row: view.estimate(at_l.at(variant=row) - at_l.at(variant="Baseline"))
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


def _equally_good(view: View) -> Iterator[str]:
    differences = at_training_length(view)
    if not differences:
        return
    ends = {row: (known.low, known.high) for row, known in differences.items()}
    apart = {
        row: known
        for row, known in differences.items()
        if None in ends[row] or max(abs(end or 0.0) for end in ends[row]) > EQUAL
    }
    said = "Whether the premise is met cannot be told: at L these scores may differ from Baseline "
    said += "by more than a point"
    if not apart:
        said = "The premise is met: at L every other score is within a point of Baseline"
    elif any((low or 0.0) > EQUAL or (high or 0.0) < -EQUAL for low, high in ends.values()):
        said = "The premise is not met: the scores are not equally good at L"
    yield f"{said}. Accuracy at L minus Baseline's, in points: {_listed(apart or differences)}."


def _copying(view: View, copiers: Sequence[str] | None) -> Iterator[str]:
    measured = copying(view, copiers)
    if not measured:
        return
    learned = [row for row, known in measured.items() if known.value >= COPIES]
    others = len(measured) - len(learned)
    said = "Copying is learned by every score"
    if not learned:
        said = "Copying is not learned by any score, so nothing about repeated text or about the "
        said += "use of far context follows from these models"
    elif others:
        said = f"Copying is learned by {', '.join(learned)} and not by the other {others}, so "
        said += "these rows differ in more than how they extrapolate"
    yield (
        f"{said}. Within L, tokens whose answer stands in the context (tiled text) minus natural "
        f"text at the same positions, in points, where a mean of {COPIES:.0f} counts as learned: "
        f"{_listed(measured)}."
    )


def _yarns_ramp(view: View) -> Iterator[str]:
    """Where L is too short for YaRN's ramp to leave more than the fastest pair as it is.

    The fastest pair turns by a radian a token, so L/2π times within L; the ramp begins at it.
    """
    length = view.one("train_length", TRAINED)
    read = any("YaRN" in str(name) for name in view.values("method"))
    if not read or length is None or length / math.tau >= YaRN.beta_fast:
        return
    yield (
        f"YaRN slows every pair of dimensions that turns fewer than {YaRN.beta_fast:.0f} times "
        f"within L; at L = {length} the fastest turns {length / math.tau:.0f} times, so all pairs "
        "but the fastest, at which the ramp then begins, are slowed. What that contributes to its "
        "cost at L was not measured."
    )


def _longer(view: View) -> Iterator[str]:
    """Where trainings of the source's architecture took more steps than these."""
    steps = select(view.frame, {"protocol": "training", "statistic": "steps"})["sum"].to_list()
    most, longer = int(max(steps, default=0)), int(preset.load(LONGER).training["steps"])
    if 0 < most < longer:
        yield (
            f"These trainings took {most:,} steps. The source's architecture after {longer:,}: "
            f"normattn reproduce keynorm --preset {LONGER}; its table is in the folder "
            f"results/keynorm-{LONGER} of the project's repository."
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


def _listed(estimates: dict[str, Estimate]) -> str:
    """Every row, or the lowest and the highest of many."""
    rows = list(estimates)
    if len(rows) > LISTED:
        ordered = sorted(rows, key=lambda row: estimates[row].value)
        rows = [ordered[0], ordered[-1]]
    said = ", ".join(f"{row} {shown(estimates[row], 1, signed=True)}" for row in rows)
    return said if len(rows) == len(estimates) else f"of {len(estimates)} from {said}"

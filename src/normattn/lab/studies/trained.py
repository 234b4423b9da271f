"""How trainings ended, for studies that test which settings fail.

A training has *learned*, or is *stuck* (less than `MARGIN` nats better than the unigram model, so
that it learned nothing of the context), or has *diverged* (its loss stopped being finite).
"""

from __future__ import annotations

from typing import Literal

from normattn.lab.evaluation.masked import learnt_nothing
from normattn.lab.report.view import View
from normattn.lab.stats.arrays import Where

End = Literal["diverged", "stuck", "learned"]
"""From the worst to the best."""


def ends(view: View, where: Where) -> dict[int, End]:
    """How the training of each seed ended, in the rows `where`; empty where none was measured.

    Seeds are judged one by one: a mean over seeds would hide one that learned nothing.
    """
    found: dict[int, End] = {}
    losses, unigrams = (view.sums(name, where) for name in ("loss", "unigram_loss"))
    if losses is not None and unigrams is not None:
        ours, guesses = (
            (part.numerator.sum((1, 2)) / part.denominator.sum((1, 2))).tolist()
            for part in (losses, unigrams)
        )
        for seed, *both in zip(losses.seeds, ours, guesses, strict=True):
            found[seed] = "stuck" if learnt_nothing(*both) else "learned"
    lost = view.values("seed", {**where, "protocol": "training", "statistic": "diverged"})
    return found | dict.fromkeys(sorted(lost), "diverged")

"""Where the study's measurements are in the frame: sizes, rows, layers, and the robustness grid.

Protocols: *masked* (hidden tokens of held-out text), *depth* (layer by layer), *grid* (as masked,
for each setting of the robustness grid), *training*.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import polars as pl

from normattn.errors import InputError
from normattn.lab.evaluation.masked import learnt_nothing
from normattn.lab.report.view import View
from normattn.lab.stats import Metric
from normattn.lab.stats.arrays import Where
from normattn.lab.stats.measurements import FACTOR
from normattn.lab.stats.metrics import accuracy, loss, mean, ratio
from normattn.lab.studies.base import ranked
from normattn.lab.studies.realformer.settings import ROWS

REALFORMER, POSTLN, PRELN = "RealFormer", "PostLN", "PreLN"
SIZE = f"{FACTOR}size"
RATE, DROPOUT, WARMUP = f"{FACTOR}learning_rate", f"{FACTOR}dropout", f"{FACTOR}warmup"

ACCURACY, LOSS = accuracy(), loss()
POINTS = Metric(ACCURACY.name, "accuracy", ACCURACY.value, "points", 2)
UNIGRAM = loss("unigram baseline", "unigram_loss")
BY_LAYER = (
    Metric("exit_accuracy", "accuracy after it, %", ratio(100.0), "%", 1),
    mean("variance", "variance of the stream", 3),
    mean("entropy", "attention entropy, nats", 3),
    mean("agreement", "agreement with the layer below", 3),
    mean("agreement_mean", "the same, mean over heads", 3),
    mean("gradients_start", "gradient norm before training", 4),
    mean("gradients", "gradient norm after training", 4),
)

State = Literal["learned", "stuck", "diverged"]


class Setting(NamedTuple):
    """One training of the robustness grid, but for its seed."""

    row: str
    warmup: int
    learning_rate: float
    dropout: float

    @property
    def where(self) -> dict[str, Any]:
        """Where its scores are in the frame."""
        varied = {WARMUP: self.warmup, RATE: self.learning_rate, DROPOUT: self.dropout}
        return {"row": self.row, "protocol": "grid", **varied}


@dataclass(frozen=True)
class Outcome:
    """How the trainings of a setting ended: the held-out loss (None where every seed diverged).

    "diverged": the loss of some seed stopped being finite; "stuck": that of some seed ends less
    than `unigram.MARGIN` nats better than the unigram baseline: it learned nothing of the context.
    """

    loss: float | None
    state: State

    @property
    def failed(self) -> bool:
        """Whether it diverged or learned nothing."""
        return self.state != "learned"


def masked(row: str, size: str) -> dict[str, Any]:
    """Where the scores of a row of the table are."""
    return {"row": row, SIZE: size, "protocol": "masked"}


def depth(row: str, size: str) -> dict[str, Any]:
    """Where the layers of a row of the table are."""
    return {"row": row, SIZE: size, "protocol": "depth"}


def sizes(view: View) -> list[str]:
    """The sizes of the table, from the smallest: by layers · width²."""

    def bulk(size: str) -> tuple[float, str]:
        layers, dim = (
            view.values("sum", {SIZE: size, "protocol": "training", "statistic": name})
            for name in ("layers", "dim")
        )
        return max(layers) * max(dim) ** 2, size

    return sorted(view.values(SIZE, {"protocol": "masked"}), key=bulk)


def names(view: View, size: str) -> list[str]:
    """The rows of a size, in the order of the table.

    Raises `InputError` where the seeds of one were not trained alike.
    """
    rows = ranked(view.values("row", {SIZE: size, "protocol": "masked"}), tuple(ROWS))
    facts = view.frame.filter(
        pl.col("protocol") == "training", pl.col("statistic").is_in(_TRAINED_ALIKE)
    )
    for row in rows:
        own = facts.filter(pl.col("row") == row, pl.col(SIZE) == size)
        if own.select("statistic", "sum").n_unique() > own["statistic"].n_unique():
            raise InputError(f"the seeds of {row} ({size}) were trained differently")
    return rows


_TRAINED_ALIKE = (
    *("layers", "dim", "parameters", "planned_steps"),
    *("learning_rate", "dropout", "warmup"),
)


def layers(view: View, size: str) -> int:
    """How many layers the models of a size have."""
    return int(max(view.values("layer", {SIZE: size, "protocol": "depth"}), default=0))


def grid(view: View) -> dict[Setting, Outcome]:
    """The robustness grid: rows as in the table, with warm-up first, then dropouts and rates."""
    return {
        setting: outcome(view, setting.where)
        for setting in sorted(set(_settings(view)), key=_order)
    }


def _settings(view: View) -> Iterator[Setting]:
    if RATE not in view.frame.columns:
        return
    rows = view.frame.filter(pl.col(RATE).is_not_null())
    for values in rows.select("row", WARMUP, RATE, DROPOUT).unique().rows():
        yield Setting(*values)


def _order(setting: Setting) -> tuple[Any, ...]:
    position = list(ROWS).index(setting.row) if setting.row in ROWS else len(ROWS)
    return (position, setting.row, -setting.warmup, setting.dropout, setting.learning_rate)


def outcome(view: View, where: Where) -> Outcome:
    """How the trainings of the setting that `where` names ended."""
    loss, unigram = (view.sums(name, where) for name in (LOSS.name, UNIGRAM.name))
    lost = {**where, "protocol": "training", "statistic": "diverged"}
    if loss is None or unigram is None:
        return Outcome(None, "diverged")
    value = float(loss.numerator.sum() / loss.denominator.sum())
    if view.values("seed", lost):
        return Outcome(value, "diverged")
    # Each seed for itself: the mean over seeds hides one that learned nothing.
    ends, guesses = (
        part.numerator.sum((1, 2)) / part.denominator.sum((1, 2)) for part in (loss, unigram)
    )
    stuck = any(learnt_nothing(*pair) for pair in zip(ends.tolist(), guesses.tolist(), strict=True))
    return Outcome(value, "stuck" if stuck else "learned")


def by_setting(
    outcomes: Mapping[Setting, Outcome], row: str
) -> dict[tuple[int, float, float], Outcome]:
    """The outcomes of one row."""
    return {setting[1:]: end for setting, end in outcomes.items() if setting.row == row}

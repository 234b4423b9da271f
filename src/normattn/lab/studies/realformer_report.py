"""The claims and figures of the RealFormer study, and where its measurements are.

Protocols: *masked* (hidden tokens of held-out text), *depth* (layer by layer), *grid* (as masked,
for each setting of the robustness grid), *training*. Sources of claims: the paper (arXiv
2012.11747), the post (kexue.fm/archives/8027), and for PreLN and PostLN arXiv 2002.04745. "Asked
here": no sentence of theirs, but a test of one (if attention converges with depth, sharing layers
should cost less). Training's stability is about settings, which are chosen and not drawn: there an
exact sign test over the settings decides.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, NamedTuple, get_args

import polars as pl

from normattn.errors import InputError
from normattn.lab.report.claims import Claim
from normattn.lab.report.figures import Curves, Figure, Grid, Line, Panel, Point
from normattn.lab.report.view import View, bin_points
from normattn.lab.stats import Estimate, Metric, sign_test
from normattn.lab.stats.arrays import Where
from normattn.lab.stats.measurements import FACTOR
from normattn.lab.stats.metrics import accuracy, loss, mean, mean_of_bins, ratio
from normattn.lab.studies.lm_report import ranked
from normattn.lab.studies.realformer_runs import ROWS
from normattn.lab.studies.trained import End, ends

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

# What was measured


class Setting(NamedTuple):
    """One training of the robustness grid, but for its seed."""

    row: str
    warmup: int
    learning_rate: float
    dropout: float

    @property
    def where(self) -> dict[str, Any]:
        """Where its scores are in the measurements."""
        varied = {WARMUP: self.warmup, RATE: self.learning_rate, DROPOUT: self.dropout}
        return {"row": self.row, "protocol": "grid", **varied}


@dataclass(frozen=True)
class Outcome:
    """How the trainings of a setting ended: the held-out loss (None where every seed diverged)."""

    loss: float | None
    state: End

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
    alike = ("layers", "dim", "parameters", "planned_steps", "learning_rate", "dropout", "warmup")
    rows = ranked(view.values("row", {SIZE: size, "protocol": "masked"}), tuple(ROWS))
    facts = view.frame.filter(pl.col("protocol") == "training", pl.col("statistic").is_in(alike))
    for row in rows:
        own = facts.filter(pl.col("row") == row, pl.col(SIZE) == size)
        if own.select("statistic", "sum").n_unique() > own["statistic"].n_unique():
            raise InputError(f"the seeds of {row} ({size}) were trained differently")
    return rows


def grid(view: View) -> dict[Setting, Outcome]:
    """The robustness grid: rows as in the table, with warm-up first, then dropouts and rates."""
    if RATE not in view.frame.columns:
        return {}
    rows = view.frame.filter(pl.col(RATE).is_not_null())
    settings = {Setting(*v) for v in rows.select("row", WARMUP, RATE, DROPOUT).unique().rows()}
    order = ranked({*ROWS, *(setting.row for setting in settings)}, tuple(ROWS))
    ordered = sorted(
        settings, key=lambda s: (order.index(s.row), -s.warmup, s.dropout, s.learning_rate)
    )
    return {setting: outcome(view, setting.where) for setting in ordered}


def outcome(view: View, where: Where) -> Outcome:
    """How the trainings of the setting that `where` names ended; the worst of them counts."""
    found, loss_ = set(ends(view, where).values()), view.estimate(LOSS, where)
    state: End = next((end for end in get_args(End) if end in found), "diverged")
    return Outcome(None if loss_ is None else loss_.value, state)


# Claims

PAPER, POST, XIONG = "arXiv 2012.11747", "kexue 8027", "arXiv 2002.04745"
OPEN, HERE = "left open in kexue 8027", "asked here"
COMMENTS = "asked in kexue 8027's comments"
MATTERS = 1.0
"""Points of accuracy that would matter: wider intervals are inconclusive."""
_BETTER = "RealFormer is better than PostLN and PreLN at equal steps"
_REZERO = "RealFormer is better than ReZero"
COMPARED: tuple[tuple[str, str, str, str], ...] = (
    (_BETTER, PAPER, REALFORMER, POSTLN),
    (_BETTER, PAPER, REALFORMER, PRELN),
    (
        f"PostLN is at least as good as PreLN (less than {MATTERS:.0f} point worse)",
        *(POST, POSTLN, PRELN),
    ),
    (
        "with half the steps RealFormer is better than PostLN with all of them "
        "(said of downstream scores; tested here on hidden tokens)",
        *(PAPER, "RealFormer-half", POSTLN),
    ),
    (_REZERO, OPEN, REALFORMER, "ReZero"),
    (f"{_REZERO} without norms", OPEN, REALFORMER, "ReZeroNoNorm"),
    ("residual scores help under PreLN too", HERE, "RealFormer-PreLN", PRELN),
    ("residual scores are better than residual q and k", HERE, REALFORMER, "ResidualQK"),
    ("residual values help beside residual q and k", COMMENTS, "ResidualQKV", "ResidualQK"),
    ("residual scores are better than residual q, k and v", COMMENTS, REALFORMER, "ResidualQKV"),
    (
        "a trained PostLN gains more by going on as RealFormer than as it is",
        *(COMMENTS, "RealFormer-from-PostLN", "PostLN-continued"),
    ),
)
"""A sentence, its source, and two rows of one size of which the first is said to be better."""


def claims(view: View) -> list[Claim]:
    """Every claim that the table, the layers and the grid can test, in the order of the page."""
    every = sizes(view)
    compared = partial(Claim, matters=MATTERS)

    def of(row: str, size: str) -> Metric:
        return POINTS.at(masked(row, size))

    made = [
        compared(
            sentence,
            of(ours, size) - of(theirs, size),
            source,
            f"{size}: {ours} − {theirs}, accuracy in points",
            margin=MATTERS if "at least as good" in sentence else 0.0,
        )
        for sentence, source, ours, theirs in COMPARED
        for size in every
    ]
    for other in (POSTLN, PRELN) if len(every) > 1 else ():
        small, large = every[0], every[-1]
        gain, others = (of(row, large) - of(row, small) for row in (REALFORMER, other))
        made.append(
            compared(
                "a larger model pays off with RealFormer more than without",
                gain - others,
                *(POST, f"{small} → {large}: RealFormer's gain − {other}'s, accuracy in points"),
            )
        )
    for size in every:
        gain, others = (of(f"{row}-shared", size) - of(row, size) for row in (REALFORMER, POSTLN))
        made.append(
            compared(
                "sharing one block among all layers costs RealFormer less",
                gain - others,
                *(HERE, f"{size}: RealFormer − PostLN, points gained by sharing (negative: lost)"),
            )
        )
    made += _stability(grid(view))
    for size in every:
        layers = view.values("layer", {SIZE: size, "protocol": "depth"})
        if (count := int(max(layers, default=0))) > 1:
            made += _of_layers(size, count)
    order = list(dict.fromkeys(claim.sentence for claim in made))
    return sorted(made, key=lambda claim: order.index(claim.sentence))


def _sum(metrics: Iterable[Metric]) -> Metric:
    return reduce(operator.add, metrics)


def _of_layers(size: str, count: int) -> Iterator[Claim]:
    """What sources say of the layers of models: RealFormer − PostLN, or last − first."""
    both = ((REALFORMER, 1.0), (POSTLN, -1.0))
    metrics = {metric.name: replace(metric, digits=2) for metric in BY_LAYER}

    def means(name: str, words: str, bins: slice = slice(None)) -> tuple[Metric, str]:
        """The mean over layers."""
        metric = replace(metrics[name], value=mean_of_bins).between(bins)
        ours, theirs = (metric.at(depth(row, size)) for row in (REALFORMER, POSTLN))
        return ours - theirs, f"{size}: RealFormer − PostLN, {words}"

    def apart(
        name: str, rows: tuple[tuple[str, float], ...], words: str, first: int = 0
    ) -> tuple[Metric, str]:
        """Σ factor · (the last layer − the one at place `first`) over `rows`."""
        change = metrics[name].between([-1]) - metrics[name].between([first])
        return _sum(
            factor * change.at(depth(row, size)) for row, factor in rows
        ), f"{size}: {words}"

    # Layer 1 has none below it: of `count` − 1 agreements the upper half counts.
    upper, half = slice((count - 1) // 2, None), count // 2
    agrees = "attention of neighbouring layers agrees more, so that it converges"
    for sentence, source, sign, (metric, measured) in (
        (
            "RealFormer's attention is sparser: its entropy is lower",
            *(PAPER, -1, means("entropy", "entropy in nats, mean over layers")),
        ),
        (agrees, POST, 1, means("agreement", "agreement head by head, upper half", upper)),
        (agrees, POST, 1, means("agreement_mean", "agreement of mean heads, upper half", upper)),
        (
            "RealFormer's attention tends to one-hot with depth",
            *(POST, -1),
            apart("entropy", both[:1], "RealFormer, entropy in nats, last − first layer"),
        ),
        (
            "leaving at half depth costs RealFormer less (models of adaptive depth, as FastBERT)",
            *(POST, -1),
            apart(
                "exit_accuracy",
                both,
                f"RealFormer − PostLN, points lost by leaving after layer {half} of {count}",
                half - 1,
            ),
        ),
        (
            "PreLN's residual stream grows with depth",
            *(XIONG, 1),
            # Place 0 is what the first layer reads.
            apart("variance", ((PRELN, 1.0),), "PreLN, variance, last − first layer", 1),
        ),
        (
            "before training, PostLN's gradient is larger at the top than at the bottom",
            *(XIONG, 1),
            apart("gradients_start", ((POSTLN, 1.0),), "PostLN, gradient norm, top − bottom layer"),
        ),
        (
            "residual scores bring the gradients of top and bottom closer together",
            *(POST, -1),
            apart(
                "gradients_start",
                both,
                "RealFormer − PostLN, gradient norm before training, top − bottom layer",
            ),
        ),
    ):
        yield Claim(sentence, metric, source, measured, sign)


Ends = dict[tuple[float | int, ...], Outcome]
"""How the settings of a row ended, by what they vary."""


def _stability(outcomes: Mapping[Setting, Outcome]) -> Iterator[Claim]:
    """Which settings of the grid fail with one row alone, or without warm-up alone."""

    def of(row: str, *, warm: bool | None = None) -> Ends:
        """With or without warm-up, by rate and dropout; None: both, by warm-up too."""
        own: Ends = {setting[1:]: end for setting, end in outcomes.items() if setting.row == row}
        if warm is None:
            return own
        return {point[1:]: end for point, end in own.items() if (point[0] > 0) == warm}

    cold, warm = ({row: of(row, warm=w) for row in (REALFORMER, POSTLN)} for w in (False, True))
    needs = "RealFormer needs warm-up less than PostLN"
    for sentence, source, name, mine, other, theirs, sign in (
        (
            "RealFormer stabilises training",
            *(PAPER, REALFORMER, of(REALFORMER), POSTLN, of(POSTLN), -1),
        ),
        (
            "RealFormer is as easy to train as PreLN (it does not fail in more settings)",
            *(POST, REALFORMER, of(REALFORMER), PRELN, of(PRELN), -1),
        ),
        (
            "PostLN needs warm-up (it fails in more settings without)",
            *(POST, "PostLN without warm-up", cold[POSTLN], "with", warm[POSTLN], 1),
        ),
        (
            needs,
            *(POST, "without warm-up: RealFormer", cold[REALFORMER], "PostLN", cold[POSTLN], -1),
        ),
    ):
        yield from _failing(sentence, source, name, mine, other, theirs, sign)
    every = (*cold.values(), *warm.values())
    places = [
        point
        for point in cold[REALFORMER]
        if all(point in part and part[point].loss is not None for part in every)
    ]
    if places:
        warmups = [setting.warmup for setting in outcomes]
        yield Claim(
            needs,
            _sum(
                (sign / len(places)) * LOSS.at(Setting(row, warmup, *point).where)
                for row, of_row in ((REALFORMER, 1.0), (POSTLN, -1.0))
                for warmup, sign in ((min(warmups), of_row), (max(warmups), -of_row))
                for point in places
            ),
            POST,
            "grid: RealFormer − PostLN, loss without − with warm-up, mean over "
            f"{len(places)} settings, nats",
            sign=-1,
        )


def _failing(
    sentence: str, source: str, name: str, mine: Ends, other: str, theirs: Ends, sign: int
) -> Iterator[Claim]:
    """How many settings fail in `mine` and in `theirs`: a two-sided exact sign test over them."""
    both = [(mine[point].failed, theirs[point].failed) for point in mine if point in theirs]
    if not both:
        return
    counts = [sum(pair[side] for pair in both) for side in (0, 1)]
    alone = [both.count((True, False)), both.count((False, True))]
    difference = Estimate(float(counts[0] - counts[1]), p=sign_test(*alone), count=len(both))
    measured = (
        f"grid, settings that failed: {name} {counts[0]} − {other} {counts[1]} of {len(both)} "
        f"(only one of them: {alone[0]}, {alone[1]})"
    )
    yield Claim(sentence, None, source, measured, sign, test=lambda view: difference, digits=0)


# Figures

GROUPS = {
    "residual scores": (
        *("PostLN", "RealFormer", "PreLN", "RealFormer-PreLN", "ResidualQK"),
        *("ResidualQKV", "ValueResidual", "RealFormer-mean", "RealFormer-half"),
    ),
    "placements": (
        *("PostLN", "PreLN", "AttnRes", "DeepNorm", "ReZero", "ReZeroNoNorm", "FixedScale"),
    ),
    "from a trained PostLN": ("PostLN", "RealFormer", "PostLN-continued", "RealFormer-from-PostLN"),
    "one block for all layers": ("PostLN", "RealFormer", "PostLN-shared", "RealFormer-shared"),
}
"""Which rows share a panel, by its title."""
NEIGHBOURS = "Agreement of attention with the layer below"
BY_DEPTH = {
    "exit_accuracy": ("accuracy_by_exit", "Accuracy after each layer", "accuracy (%)"),
    "variance": ("residual_variance", "Variance of the residual stream", "variance"),
    "entropy": ("attention_entropy", "Entropy of attention", "entropy (nats)"),
    "agreement": (*("attention_agreement", f"{NEIGHBOURS}, head by head", "1 − total variation"),),
    "agreement_mean": (
        *("attention_agreement_mean", f"{NEIGHBOURS}, mean over heads", "1 − total variation"),
    ),
    "gradients_start": (
        *("gradients_start", "Gradient of each layer before training", "gradient norm"),
    ),
    "gradients": ("gradients", "Gradient of each layer after training", "gradient norm"),
}
"""The name, the title and the axis of each figure by layer."""
LOGARITHMIC = ("variance", "gradients_start", "gradients")


def figures(view: View) -> list[Figure]:
    """Each statistic by layer, and the robustness grid."""
    groups = list(_groups(view))
    made: list[Figure] = []
    for metric in BY_LAYER:
        name, title, axis = BY_DEPTH[metric.name]
        panels = []
        for panel, size, rows in groups:
            curves = {
                row: bin_points(view, metric, depth(row, size), lambda bin_: bin_[0])
                for row in rows
            }
            lines = tuple(_line(row, curve) for row, curve in curves.items() if curve)
            log = metric.name in LOGARITHMIC
            panels.append(Panel(panel, lines, "after layer", axis, log_y=log))
        made.append(Curves(name, title, tuple(panels)))
    return [*made, _robustness(view)]


def _groups(view: View) -> Iterator[tuple[str, str, list[str]]]:
    """A title, the size and the rows of each panel: at least two, not all of another's."""
    every = sizes(view)
    for size in every:
        shown: list[set[str]] = []
        own = names(view, size)
        for title, members in GROUPS.items():
            rows = [row for row in members if row in own]
            if len(rows) > 1 and not any(set(rows) <= other for other in shown):
                yield (f"{size}: {title}" if len(every) > 1 else title), size, rows
                shown.append(set(rows))


def _line(row: str, points: tuple[Point, ...]) -> Line:
    """Rows that differ in their steps, their start or in sharing one block have one colour."""
    setting = ROWS[row]
    plain = setting.model_copy(update={"half": False, "shared": False, "start": None})
    family = next(name for name, other in ROWS.items() if other == plain)
    return Line(row, points, family, dashed=setting != plain)


def _robustness(view: View) -> Figure:
    """Held-out loss of every setting; one that failed has no colour and says how."""
    outcomes = grid(view)
    lines = list(dict.fromkeys((setting.row, setting.warmup) for setting in outcomes))
    places = list(dict.fromkeys((s.learning_rate, s.dropout) for s in outcomes))
    values: dict[tuple[object, object], float | None] = {}
    texts: dict[tuple[object, object], str] = {}
    for setting, outcome in outcomes.items():
        key = (setting[:2], setting[2:])
        values[key] = None if outcome.failed else outcome.loss
        words = [] if outcome.loss is None else [f"{outcome.loss:.2f}"]
        texts[key] = " ".join([*words, *([outcome.state] if outcome.failed else [])])
    return Grid(
        "robustness",
        "Robustness to learning rate and dropout: held-out loss",
        tuple(f"{row}, warm-up of {n} steps" if n else f"{row}, no warm-up" for row, n in lines),
        tuple(f"{rate:g}, {dropout:g}" for rate, dropout in places),
        tuple(tuple(values.get((line, point)) for point in places) for line in lines),
        tuple(tuple(texts.get((line, point), "") for point in places) for line in lines),
        x_title="learning rate, dropout",
        scale_title="loss (nats per masked token)",
    )

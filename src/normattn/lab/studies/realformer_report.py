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
from collections.abc import Iterator
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple, get_args

import polars as pl

from normattn.lab.report.claims import Claim
from normattn.lab.report.figures import Curves, Figure, Line, Panel, Point
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
MASKED, TRAINING, DEPTH = ({"protocol": name} for name in ("masked", "training", "depth"))
ACCURACY, LOSS, UNIGRAM = accuracy(), loss(), loss("unigram baseline", "unigram_loss")
POINTS = Metric(ACCURACY.name, "accuracy", ACCURACY.value, "points", 2)


class Layered(NamedTuple):
    """A number of each layer, and its figure."""

    metric: Metric
    figure: str
    title: str
    axis: str
    log: bool = False


NEIGHBOURS, OVERLAP = "Agreement of attention with the layer below", "1 − total variation"
NORM = "gradient norm"
BY_LAYER = (
    Layered(
        Metric("exit_accuracy", "accuracy after it, %", ratio(100.0), "%", 1),
        *("accuracy_by_exit", "Accuracy after each layer", "accuracy (%)"),
    ),
    Layered(
        mean("variance", "variance of the stream", 3),
        *("residual_variance", "Variance of the residual stream", "variance", True),
    ),
    Layered(
        mean("entropy", "attention entropy, nats", 3),
        *("attention_entropy", "Entropy of attention", "entropy (nats)"),
    ),
    Layered(
        mean("agreement", "agreement with the layer below", 3),
        *("attention_agreement", f"{NEIGHBOURS}, head by head", OVERLAP),
    ),
    Layered(
        mean("agreement_mean", "the same, mean over heads", 3),
        *("attention_agreement_mean", f"{NEIGHBOURS}, mean over heads", OVERLAP),
    ),
    Layered(
        mean("gradients_start", "gradient norm before training", 4),
        *("gradients_start", "Gradient of each layer before training", NORM, True),
    ),
    Layered(
        mean("gradients", "gradient norm after training", 4),
        *("gradients", "Gradient of each layer after training", NORM, True),
    ),
)

# What was measured


def sizes(view: View) -> list[str]:
    """The sizes of the table, from the fewest parameters."""

    def parameters(size: str) -> float:
        return float(max(view.values("sum", {SIZE: size, **TRAINING, "statistic": "parameters"})))

    return sorted(view.values(SIZE, MASKED), key=parameters)


def names(view: View, size: str) -> list[str]:
    """The rows of a size, in the order of the table."""
    return ranked(view.values("row", {SIZE: size, **MASKED}), tuple(ROWS))


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


def state(view: View, where: Where) -> End:
    """How the trainings of the setting that `where` names ended; the worst of them counts."""
    found = set(ends(view, where).values())
    return next((end for end in get_args(End) if end in found), "diverged")


def grid(view: View) -> dict[Setting, End]:
    """The robustness grid: rows as in the table, with warm-up first, then dropouts and rates."""
    if RATE not in view.frame.columns:
        return {}
    rows = view.frame.filter(pl.col(RATE).is_not_null())
    settings = [Setting(*v) for v in rows.select("row", WARMUP, RATE, DROPOUT).unique().rows()]
    order = ranked({*ROWS, *(setting.row for setting in settings)}, tuple(ROWS))
    settings.sort(key=lambda s: (order.index(s.row), -s.warmup, s.dropout, s.learning_rate))
    return {setting: state(view, setting.where) for setting in settings}


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
        "a trained PostLN gains more by continuing as RealFormer than unmodified",
        *(COMMENTS, "RealFormer-from-PostLN", "PostLN-continued"),
    ),
)
"""A sentence, its source, and two rows of one size of which the first is said to be better."""


def claims(view: View) -> list[Claim]:
    """Every claim that the table, the layers and the grid can test, in the order of the page."""
    every = sizes(view)
    made = [*_compared(every), *_stability(view)]
    for size in every:
        layers = view.values("layer", {SIZE: size, **DEPTH})
        if (count := int(max(layers, default=0))) > 1:
            made += _of_layers(size, count)
    order = list(dict.fromkeys(claim.sentence for claim in made))
    return sorted(made, key=lambda claim: order.index(claim.sentence))


def _compared(every: list[str]) -> Iterator[Claim]:
    """Differences of accuracy between rows, and between their gains."""
    compared = partial(Claim, matters=MATTERS)

    def of(row: str, size: str) -> Metric:
        return POINTS.at({**MASKED, "row": row, SIZE: size})

    for sentence, source, ours, theirs in COMPARED:
        margin = MATTERS if "at least as good" in sentence else 0.0
        for size in every:
            measured = f"{size}: {ours} − {theirs}, accuracy in points"
            gap = of(ours, size) - of(theirs, size)
            yield compared(sentence, gap, source, measured, margin=margin)
    small, large = every[:1], every[-1:]
    for other in (POSTLN, PRELN) if len(every) > 1 else ():
        gain, others = (of(row, large[0]) - of(row, small[0]) for row in (REALFORMER, other))
        yield compared(
            "a larger model pays off with RealFormer more than without",
            gain - others,
            POST,
            f"{small[0]} → {large[0]}: RealFormer's gain − {other}'s, accuracy in points",
        )
    for size in every:
        gain, others = (of(f"{row}-shared", size) - of(row, size) for row in (REALFORMER, POSTLN))
        yield compared(
            "sharing one block among all layers costs RealFormer less",
            gain - others,
            *(HERE, f"{size}: RealFormer − PostLN, points gained by sharing (negative: lost)"),
        )


def _of_layers(size: str, count: int) -> Iterator[Claim]:
    """What sources say of the layers of models: RealFormer − PostLN, or last − first."""
    metrics = {each.metric.name: replace(each.metric, digits=2) for each in BY_LAYER}

    def of(row: str, metric: Metric) -> Metric:
        return metric.at({**DEPTH, "row": row, SIZE: size})

    def gap(metric: Metric) -> Metric:
        return of(REALFORMER, metric) - of(POSTLN, metric)

    def means(name: str, bins: slice = slice(None)) -> Metric:
        """The mean over some layers."""
        return replace(metrics[name], value=mean_of_bins).between(bins)

    def rise(name: str, first: int = 0) -> Metric:
        """The last layer − the one at place `first`."""
        return metrics[name].between([-1]) - metrics[name].between([first])

    # Layer 1 has none below it: of `count` − 1 agreements the upper half counts.
    upper, half = slice((count - 1) // 2, None), count // 2
    agrees = "attention of neighbouring layers agrees more, so that it converges"
    both = f"{REALFORMER} − {POSTLN},"
    for sentence, source, sign, metric, measured in (
        (
            "RealFormer's attention is sparser: its entropy is lower",
            *(PAPER, -1, gap(means("entropy")), f"{both} entropy in nats, mean over layers"),
        ),
        (
            *(agrees, POST, 1, gap(means("agreement", upper))),
            f"{both} agreement head by head, upper half",
        ),
        (
            *(agrees, POST, 1, gap(means("agreement_mean", upper))),
            f"{both} agreement of mean heads, upper half",
        ),
        (
            "RealFormer's attention tends to one-hot with depth",
            *(POST, -1, of(REALFORMER, rise("entropy"))),
            "RealFormer, entropy in nats, last − first layer",
        ),
        (
            "leaving at half depth costs RealFormer less (models of adaptive depth, as FastBERT)",
            *(POST, -1, gap(rise("exit_accuracy", half - 1))),
            f"{both} points lost by leaving after layer {half} of {count}",
        ),
        (
            "PreLN's residual stream grows with depth",
            # Place 0 is what the first layer reads.
            *(XIONG, 1, of(PRELN, rise("variance", 1)), "PreLN, variance, last − first layer"),
        ),
        (
            "before training, PostLN's gradient is larger at the top than at the bottom",
            *(XIONG, 1, of(POSTLN, rise("gradients_start"))),
            "PostLN, gradient norm, top − bottom layer",
        ),
        (
            "residual scores bring the gradients of top and bottom closer together",
            *(POST, -1, gap(rise("gradients_start"))),
            f"{both} gradient norm before training, top − bottom layer",
        ),
    ):
        yield Claim(sentence, metric, source, f"{size}: {measured}", sign)


Ends = dict[tuple[float | int, ...], End]
"""How the settings of a row ended, by what they vary."""


def _stability(view: View) -> Iterator[Claim]:
    """Which settings of the grid fail with one row alone, or without warm-up alone."""
    settings = grid(view)
    every: dict[str, Ends] = {
        row: {setting[1:]: end for setting, end in settings.items() if setting.row == row}
        for row in (REALFORMER, POSTLN, PRELN)
    }
    cold, warm = (
        {
            row: {point[1:]: end for point, end in own.items() if bool(point[0]) == warmed}
            for row, own in every.items()
        }
        for warmed in (False, True)
    )
    needs = "RealFormer needs warm-up less than PostLN"
    for sentence, source, sign, names_, both in (
        (
            *("RealFormer stabilises training", PAPER, -1, (REALFORMER, POSTLN)),
            (every[REALFORMER], every[POSTLN]),
        ),
        (
            "RealFormer is as easy to train as PreLN (it does not fail in more settings)",
            *(POST, -1, (REALFORMER, PRELN), (every[REALFORMER], every[PRELN])),
        ),
        (
            "PostLN needs warm-up (it fails in more settings without)",
            *(POST, 1, ("PostLN without warm-up", "with"), (cold[POSTLN], warm[POSTLN])),
        ),
        (
            *(needs, POST, -1, ("without warm-up: RealFormer", "PostLN")),
            (cold[REALFORMER], cold[POSTLN]),
        ),
    ):
        yield from _fails(sentence, source, sign, names_, both)
    warmups = sorted({setting.warmup for setting in settings})
    # Differences of differences: without − with warm-up, RealFormer's − PostLN's.
    signs = {
        (row, warmup): of_row * sign
        for row, of_row in ((REALFORMER, 1.0), (POSTLN, -1.0))
        for warmup, sign in zip(warmups[:1] + warmups[-1:], (1.0, -1.0), strict=False)
    }
    places = [
        point
        for point in cold[REALFORMER]
        if all(view.sums(LOSS.name, Setting(*at, *point).where) for at in signs)
    ]
    if places and len(warmups) > 1:
        terms = [
            (sign / len(places)) * LOSS.at(Setting(*at, *point).where)
            for at, sign in signs.items()
            for point in places
        ]
        measured = (
            "grid: RealFormer − PostLN, loss without − with warm-up, mean over "
            f"{len(places)} settings, nats"
        )
        yield Claim(needs, reduce(operator.add, terms), POST, measured, sign=-1)


def _fails(
    sentence: str, source: str, sign: int, called: tuple[str, str], settings: tuple[Ends, Ends]
) -> Iterator[Claim]:
    """How many settings fail in one part and in another: an exact sign test over the settings."""
    mine, theirs = settings
    both = [
        (mine[point] != "learned", theirs[point] != "learned") for point in mine if point in theirs
    ]
    if both:
        counts = [sum(pair[side] for pair in both) for side in (0, 1)]
        alone = [both.count((True, False)), both.count((False, True))]
        difference = Estimate(float(counts[0] - counts[1]), p=sign_test(*alone), count=len(both))
        measured = (
            f"grid, settings that failed: {called[0]} {counts[0]} − {called[1]} {counts[1]} of "
            f"{len(both)} (only one of them: {alone[0]}, {alone[1]})"
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


def figures(view: View) -> Iterator[Figure]:
    """Each statistic by layer."""
    groups = list(_groups(view))
    for metric, name, title, axis, log in BY_LAYER:
        panels = []
        for panel, size, rows in groups:
            where = {SIZE: size, **DEPTH}
            curves = (
                (row, bin_points(view, metric, {**where, "row": row}, _layer)) for row in rows
            )
            lines = tuple(_line(row, curve) for row, curve in curves if curve)
            panels.append(Panel(panel, lines, "after layer", axis, log_y=log))
        yield Curves(name, title, tuple(panels))


def _layer(bin_: tuple[Any, ...]) -> float:
    return float(bin_[0])


def _groups(view: View) -> Iterator[tuple[str, str, list[str]]]:
    """A title, the size and the rows of each panel: at least two, not all of another's."""
    every = sizes(view)
    for size in every:
        shown_: list[set[str]] = []
        own = names(view, size)
        for title, members in GROUPS.items():
            rows = [row for row in members if row in own]
            if len(rows) > 1 and not any(set(rows) <= other for other in shown_):
                yield (f"{size}: {title}" if len(every) > 1 else title), size, rows
                shown_.append(set(rows))


def _line(row: str, points: tuple[Point, ...]) -> Line:
    """Rows that differ in their steps, their start or in sharing one block have one colour."""
    plain = ROWS[row].model_copy(update={"half": False, "shared": False, "start": None})
    family = next(name for name, other in ROWS.items() if other == plain)
    return Line(row, points, family, dashed=ROWS[row] != plain)

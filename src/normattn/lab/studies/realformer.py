"""Do residual attention scores make a better encoder? (RealFormer, arXiv 2012.11747, kexue 8027)

Masked language models that differ in the placement of norms and in whether scores are summed from
layer to layer are trained alike. They are compared in what they predict, in what happens layer by
layer, and in the learning rates and dropouts that they tolerate, with and without warm-up.

Protocols: *masked* (hidden tokens of held-out text), *depth* (layer by layer), *grid* (as masked,
for each setting of the robustness grid), *training*. Sources of claims: the paper (arXiv
2012.11747), the post (kexue.fm/archives/8027), and for PreLN and PostLN arXiv 2002.04745. "Asked
here": no sentence of theirs, but a test of one (if attention converges with depth, sharing layers
should cost less). Training's stability is about settings, which are chosen and not drawn: there an
exact sign test over the settings decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, get_args

import polars as pl

from normattn.lab.evaluation.masked import MARGIN
from normattn.lab.report.claims import Claim
from normattn.lab.report.figures import Curves, Figure, Line, Panel
from normattn.lab.report.tables import Column, Row, Table, shown, text_column
from normattn.lab.report.view import View, bin_points
from normattn.lab.stats import Estimate, Metric, sign_test
from normattn.lab.stats.arrays import Where
from normattn.lab.stats.measurements import FACTOR
from normattn.lab.stats.metrics import mean, mean_of_bins, ratio
from normattn.lab.studies.base import Study
from normattn.lab.studies.lm_report import ranked
from normattn.lab.studies.realformer_runs import ROWS, EncoderRun, resolve
from normattn.lab.studies.trained import End, ends
from normattn.lab.sweep.collect import measured_below

REALFORMER, POSTLN, PRELN = "RealFormer", "PostLN", "PreLN"
SIZE = f"{FACTOR}size"
RATE, DROPOUT, WARMUP = f"{FACTOR}learning_rate", f"{FACTOR}dropout", f"{FACTOR}warmup"
MASKED, TRAINING, DEPTH = ({"protocol": name} for name in ("masked", "training", "depth"))
ACCURACY, LOSS, UNIGRAM = (Metric(name) for name in ("accuracy", "loss", "unigram_loss"))
POINTS = Metric(ACCURACY.name, "accuracy", ACCURACY.value, "points", 2)
BY_LAYER = {
    "accuracy_by_exit": Metric(
        "exit_accuracy", "accuracy after the layer, %", ratio(100.0), "%", 1
    ),
    "residual_variance": mean("variance", "variance of the stream", 3),
    "attention_entropy": mean("entropy", "attention entropy, nats", 3),
    "attention_agreement": mean("agreement", "agreement with the layer below", 3),
    "attention_agreement_mean": mean("agreement_mean", "agreement, mean over heads", 3),
    "gradients_start": mean("gradients_start", "gradient norm before training", 4),
}
"""What is measured of each layer, by the name of its figure."""
LOGARITHMIC = ("variance", "gradients_start")

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


# Tables


def _rows(view: View) -> list[Row]:
    return [
        Row(name, {"row": name, SIZE: size}) for size in sizes(view) for name in names(view, size)
    ]


def _layer_rows(view: View) -> list[Row]:
    """Each layer of each row; 0 is what the first layer reads."""
    return [
        Row(row.label, {**row.where, "layer": layer})
        for row in _rows(view)
        for layer in sorted(view.values("layer", {**row.where, **DEPTH}))
    ]


SIZES = text_column("size", "size", lambda view, row: row.where[SIZE])


def _fact(name: str, title: str, digits: int = 0) -> Column:
    """A number of the training; all seeds of a row have the same."""
    return Column(name, title, mean(name, title, digits).at(TRAINING), interval=False)


def _seeds(view: View, row: Row) -> str:
    return ", ".join(map(str, sorted(view.values("seed", {**row.where, **MASKED}))))


def _varied(factor: str, title: str) -> Column:
    key = factor.removeprefix(FACTOR)
    return text_column(key, title, lambda view, row: f"{row.where[factor]:g}")


def _notes(view: View) -> tuple[str, ...]:
    """The data behind the numbers, and what the suffixes of rows mean."""
    behind = []
    for row in _rows(view)[:1]:
        unigram = view.estimate(UNIGRAM, {**row.where, **MASKED})
        assert unigram is not None
        behind.append(
            f"Behind each value: {unigram.units} documents, {unigram.count:,} hidden tokens. The "
            f"unigram baseline has a loss of {unigram.value:.3f}."
        )
    return (
        *behind,
        "RealFormer: PostLN, and every layer adds its scores to those of the layers below; -mean: "
        "softmax reads their mean; -PreLN: under PreLN. -half: half the steps. -shared: one "
        "block's weights for all layers. -continued and -from-PostLN: the trained PostLN, and half "
        "the steps more, unmodified or as RealFormer. docs/realformer.md defines every row.",
    )


def in_short(view: View) -> list[str]:
    """What RealFormer is worth compared with PostLN and PreLN, at every size."""
    sentences = []
    for size in sizes(view):
        at = ACCURACY.at({SIZE: size, **MASKED})
        gaps = {o: view.known(at.at(row=REALFORMER) - at.at(row=o)) for o in (POSTLN, PRELN)}
        parts = [f"{name} {shown(gap, 2, signed=True)}" for name, gap in gaps.items() if gap]
        if parts:
            sentences.append(
                f"RealFormer's accuracy on hidden tokens at size {size}, in points, relative to "
                f"{', '.join(parts)}."
            )
    return sentences


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
    *(
        (f"{words} are better than {theirs}", HERE, ours, theirs)
        for ours, words in (
            ("AttnRes", "attention residuals"),
            ("ValueResidual", "value residuals"),
        )
        for theirs in (POSTLN, PRELN)
    ),
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
    made = [*_compared(every), *_stability(grid(view))]
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
    metrics = {metric.name: replace(metric, digits=2) for metric in BY_LAYER.values()}

    def of(row: str, metric: Metric) -> Metric:
        return metric.at({**DEPTH, "row": row, SIZE: size})

    def gap(metric: Metric) -> Metric:
        return of(REALFORMER, metric) - of(POSTLN, metric)

    def means(name: str, bins: slice = slice(None)) -> Metric:
        """The mean over some layers."""
        return replace(metrics[name], value=mean_of_bins).between(bins)

    def rise(name: str, first: int = 0) -> Metric:
        """The last layer − the one at place `first`."""
        return metrics[name].between(slice(-1, None)) - metrics[name].between(
            slice(first, first + 1)
        )

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


Ends = dict[tuple[Any, ...], End]
"""How the settings of a row ended, by what they vary."""


def _stability(settings: Mapping[Setting, End]) -> Iterator[Claim]:
    """Which settings of the grid fail with one row alone, or without warm-up alone."""

    def of(row: str, *warmed: bool) -> Ends:
        """A row's settings; those with warm-up, or those without, where `warmed` says so."""
        return {
            setting[1 + len(warmed) :]: end
            for setting, end in settings.items()
            if setting.row == row and bool(setting.warmup) in (warmed or (True, False))
        }

    cold = ("without warm-up: RealFormer", POSTLN)
    for sentence, source, sign, called, mine, theirs in (
        (
            *("RealFormer stabilises training", PAPER, -1, (REALFORMER, POSTLN)),
            *(of(REALFORMER), of(POSTLN)),
        ),
        (
            "RealFormer is as easy to train as PreLN (it does not fail in more settings)",
            *(POST, -1, (REALFORMER, PRELN), of(REALFORMER), of(PRELN)),
        ),
        (
            "PostLN needs warm-up (it fails in more settings without)",
            *(POST, 1, ("PostLN without warm-up", "with"), of(POSTLN, False), of(POSTLN, True)),
        ),
        (
            *("RealFormer needs warm-up less than PostLN", POST, -1, cold),
            *(of(REALFORMER, False), of(POSTLN, False)),
        ),
    ):
        shared = [(mine[at] != "learned", theirs[at] != "learned") for at in mine if at in theirs]
        if shared:
            yield _fails(sentence, source, sign, called, shared)


def _fails(
    sentence: str, source: str, sign: int, called: tuple[str, str], both: list[tuple[bool, bool]]
) -> Claim:
    """How many settings fail in one part and in another: an exact sign test over the settings."""
    ours, theirs = (sum(pair[side] for pair in both) for side in (0, 1))
    alone = both.count((True, False)), both.count((False, True))
    difference = Estimate(float(ours - theirs), p=sign_test(*alone), count=len(both))
    measured = (
        f"grid, settings that failed: {called[0]} {ours} − {called[1]} {theirs} of {len(both)} "
        f"(only one of them: {alone[0]}, {alone[1]})"
    )
    return Claim(sentence, None, source, measured, sign, test=lambda view: difference, digits=0)


# Figures

BESIDE = {
    "residual scores": (
        *("RealFormer-PreLN", "ResidualQK", "ResidualQKV", "ValueResidual", "RealFormer-mean"),
        "RealFormer-half",
    ),
    "placements": ("AttnRes", "DeepNorm", "ReZero", "ReZeroNoNorm", "FixedScale"),
    "from a trained PostLN": ("PostLN-continued", "RealFormer-from-PostLN"),
    "one block for all layers": ("PostLN-shared", "RealFormer-shared"),
}
"""The rows of each panel, by its title; every panel has PostLN, RealFormer and PreLN too."""


def figures(view: View) -> Iterator[Figure]:
    """Each statistic by layer: of each size a panel for each group, where one of it was trained."""
    for name, metric in BY_LAYER.items():
        panels = []
        for size in sizes(view):
            own = names(view, size)
            for number, (title, group) in enumerate(BESIDE.items()):
                if number and not {*group} & {*own}:
                    continue
                at = {SIZE: size, **DEPTH}
                curves = {
                    row: bin_points(view, metric, {**at, "row": row}, lambda bin_: bin_[0])
                    for row in (POSTLN, REALFORMER, PRELN, *group)
                    if row in own
                }
                lines = tuple(Line(row, curve) for row, curve in curves.items() if curve)
                axes: Any = {"log_y": metric.name in LOGARITHMIC}
                panels.append(Panel(f"{size}: {title}", lines, "layer", metric.title, **axes))
        yield Curves(name, f"{metric.title}, by layer", tuple(panels))


STUDY = Study(
    "realformer",
    "Does adding each layer's attention scores to those of the layers below make a better "
    "encoder than PostLN and PreLN, which settings does it tolerate, and what changes inside?",
    title="Residual scores and the placement of norms",
    help="Compare residual scores with PreLN, PostLN and others, in masked language models.\n\n"
    "Trains an encoder of each kind, also with half of the steps, and a grid of learning rates, "
    "dropouts and warm-up. Measures accuracy on hidden tokens of held-out text, and attention "
    "layer by layer.",
    sources=("arXiv 2012.11747", "kexue.fm/archives/8027", "arXiv 2002.04745"),
    resolve=resolve,
    runs=(EncoderRun,),
    tables=(
        Table(
            "table",
            "",
            _rows,
            (
                SIZES,
                Column("accuracy", "accuracy", ACCURACY.at(MASKED)),
                Column(
                    *("gain", "− PostLN"),
                    ACCURACY.at(MASKED) - ACCURACY.at(MASKED, variant=POSTLN),
                ),
                Column("loss", "loss", LOSS.at(MASKED)),
                _fact("planned_steps", "steps"),
                _fact("learning_rate", "learning rate", 4),
                _fact("parameters", "parameters"),
                text_column("seeds", "seeds", _seeds),
            ),
            head="row",
            intro="A masked language model's accuracy (in %) and loss (in nats) on hidden tokens "
            "of held-out text, with 95 % intervals over documents and seeds. All models read the "
            "same texts with the same tokens hidden, so that differences (in points) are paired.",
            notes=_notes,
        ),
        Table(
            "layers",
            "Layer by layer",
            _layer_rows,
            (
                SIZES,
                text_column("layer", "layer", lambda view, row: row.where["layer"]),
                *(Column(m.name, m.title, m.at(DEPTH), interval=False) for m in BY_LAYER.values()),
            ),
            head="row",
            intro="Every layer of each configuration; layer 0 is the input of the first layer. "
            "Intervals are in layers.csv and in the figures.",
            notes=(
                "accuracy after the layer: of hidden tokens, through an exit of its own (a norm "
                "and a matrix, trained on detached vectors) and the shared head; after the last "
                "layer by the model itself.",
                "agreement: what a layer's attention has in common with that of the layer below, "
                "Σ_j min(α, α′), mean over tokens.",
                "gradient norm: of the loss by a layer's parameters on held-out text, over batches "
                "and seeds; none where layers share their weights.",
            ),
        ),
        Table(
            "grid",
            "Every setting of the grid",
            lambda view: [Row(setting.row, setting.where) for setting in grid(view)],
            (
                _varied(WARMUP, "warm-up (steps)"),
                _varied(RATE, "learning rate"),
                _varied(DROPOUT, "dropout"),
                text_column("state", "outcome", lambda view, row: state(view, row.where)),
                Column("loss", "loss", LOSS),
            ),
            head="row",
            intro="Held-out loss at each learning rate and dropout, with and without warm-up. "
            "diverged: the loss stopped being finite; stuck: it ends less than "
            f"{MARGIN:g} nats below that of the unigram baseline.",
        ),
    ),
    claims=claims,
    figures=figures,
    summary=in_short,
    collect=partial(measured_below, factors=("size",)),
    variants_help="Configurations, separated by commas; skips the robustness grid. [default: all]",
    examples=(
        ("--variants PostLN,RealFormer --seeds 5", "two configurations, five seeds"),
        ("--preset gpu-base --corpus my-text/ --plan", "the cost of BERT-Base"),
    ),
)

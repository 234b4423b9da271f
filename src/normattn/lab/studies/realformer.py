"""Do residual attention scores make a better encoder? (RealFormer, arXiv 2012.11747, kexue 8027)

Masked language models differ in the placement of norms and in whether layers add up their scores.
They are compared by accuracy, layer by layer, and by the learning rates and dropouts that they
tolerate, with and without warm-up. Protocols: *masked* (masked tokens of held-out text), *depth*
(layer by layer), *grid* (as masked, for each setting of the robustness grid), *training*.

Claims come from the paper, the post, and arXiv 2002.04745 (PreLN and PostLN). "Asked here" marks
consequences that no source states. Grid settings are chosen, not random, so claims on stability use
an exact sign test over settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, get_args

import polars as pl

from normattn.lab.evaluation.masked import MARGIN
from normattn.lab.report.figures import Curves, Figure, Line, Panel
from normattn.lab.report.tables import Column, Row, Table, format_estimate, text_column
from normattn.lab.report.view import View, bin_points
from normattn.lab.stats import Estimate, Metric, sign_test
from normattn.lab.stats.arrays import Where
from normattn.lab.stats.measurements import FACTOR
from normattn.lab.stats.metrics import mean, mean_of_bins, ratio
from normattn.lab.studies.base import Claim, Study
from normattn.lab.studies.lm_report import TrainingOutcome, ranked, training_outcomes
from normattn.lab.studies.realformer_runs import ROWS, EncoderRun, resolve
from normattn.lab.sweep.collect import collect_measurements

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
    "residual_variance": mean("variance", "variance of the residual stream", 3),
    "attention_entropy": mean("entropy", "attention entropy, nats", 3),
    "attention_agreement": mean("agreement", "agreement with the layer below", 3),
    "attention_agreement_mean": mean("agreement_mean", "agreement, mean over heads", 3),
    "gradients_start": mean("gradients_start", "gradient norm before training", 4),
}
"""The metrics of each layer, by the name of their figure."""
LOGARITHMIC = ("variance", "gradients_start")

# Measurements


def sizes(view: View) -> list[str]:
    """The sizes of the table, smallest first."""
    counted = {**TRAINING, "statistic": "parameters"}
    parameters = {size: view.values("sum", {SIZE: size, **counted}) for size in view.values(SIZE)}
    return sorted(view.values(SIZE, MASKED), key=lambda size: float(max(parameters[size])))


def names(view: View, size: str) -> list[str]:
    """The rows of a size, in the order of the table."""
    return ranked(view.values("row", {SIZE: size, **MASKED}), tuple(ROWS))


class Setting(NamedTuple):
    """One setting of the robustness grid, without its seed."""

    row: str
    warmup: int
    learning_rate: float
    dropout: float

    @property
    def where(self) -> dict[str, Any]:
        """Columns that select its measurements."""
        varied = {WARMUP: self.warmup, RATE: self.learning_rate, DROPOUT: self.dropout}
        return {"row": self.row, "protocol": "grid", **varied}


def state(view: View, where: Where) -> TrainingOutcome:
    """The worst outcome of the trainings in the rows `where`."""
    outcomes = set(training_outcomes(view, where).values())
    return next((o for o in get_args(TrainingOutcome) if o in outcomes), "diverged")


def grid(view: View) -> dict[Setting, TrainingOutcome]:
    """The outcome of each setting: rows as in the table, with warm-up first."""
    if RATE not in view.frame.columns:
        return {}
    rows = view.frame.filter(pl.col(RATE).is_not_null())
    settings = [Setting(*v) for v in rows.select("row", WARMUP, RATE, DROPOUT).unique().rows()]
    order = ranked({*ROWS, *(setting.row for setting in settings)}, tuple(ROWS))
    settings.sort(key=lambda s: (order.index(s.row), -s.warmup, s.dropout, s.learning_rate))
    return {setting: state(view, setting.where) for setting in settings}


# Tables


def _rows(view: View) -> list[Row]:
    pairs = ((name, size) for size in sizes(view) for name in names(view, size))
    return [Row(name, {"row": name, SIZE: size}) for name, size in pairs]


def _layer_rows(view: View) -> list[Row]:
    """A row for each layer; layer 0 is the input of the first one."""
    return [
        Row(row.label, {**row.where, "layer": layer})
        for row in _rows(view)
        for layer in sorted(view.values("layer", {**row.where, **DEPTH}))
    ]


SIZES = text_column("size", "size", lambda view, row: row.where[SIZE])


def _training_column(name: str, title: str, digits: int = 0) -> Column:
    """A number of the training, which is the same for all seeds."""
    return Column(name, title, mean(name, title, digits).at(TRAINING), interval=False)


def _seeds(view: View, row: Row) -> str:
    return ", ".join(map(str, sorted(view.values("seed", {**row.where, **MASKED}))))


def _factor_column(name: str, title: str) -> Column:
    return text_column(name.removeprefix(FACTOR), title, lambda view, row: f"{row.where[name]:g}")


def _notes(view: View) -> list[str]:
    unigrams = [view.estimate(UNIGRAM, {**row.where, **MASKED}) for row in _rows(view)[:1]]
    return [
        *(
            f"Each value is over {unigram.units} documents with {unigram.count:,} masked tokens. "
            f"The unigram baseline has a loss of {unigram.value:.3f}."
            for unigram in filter(None, unigrams)
        ),
        "RealFormer: PostLN, and every layer adds its scores to those of the layers below. -mean: "
        "the mean instead of the sum. -PreLN: under PreLN. -half: half the steps. -shared: one "
        "block's weights for all layers. -continued and -from-PostLN: the trained PostLN continues "
        "for half the steps, unmodified or as RealFormer. docs/realformer.md defines every row.",
    ]


def in_short(view: View) -> list[str]:
    """RealFormer's accuracy relative to PostLN and PreLN, for each size."""
    sentences = []
    for size in sizes(view):
        accuracy, gaps = ACCURACY.at({SIZE: size, **MASKED}), []
        for base in (POSTLN, PRELN):
            gap = view.finite_estimate(accuracy.at(row=REALFORMER) - accuracy.at(row=base))
            gaps += [] if gap is None else [f"{base} {format_estimate(gap, 2, signed=True)}"]
        if gaps:
            sentences.append(
                f"RealFormer's accuracy on masked tokens at size {size}, in points, relative to "
                f"{', '.join(gaps)}."
            )
    return sentences


# Claims

PAPER, POST, XIONG = "arXiv 2012.11747", "kexue 8027", "arXiv 2002.04745"
OPEN, HERE, COMMENTS = f"left open in {POST}", "asked here", f"asked in {POST}'s comments"
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
        "(the paper means downstream scores; tested here on masked tokens)",
        *(PAPER, "RealFormer-half", POSTLN),
    ),
    (_REZERO, OPEN, REALFORMER, "ReZero"),
    (f"{_REZERO} without norms", OPEN, REALFORMER, "ReZeroNoNorm"),
    ("residual scores help under PreLN too", HERE, "RealFormer-PreLN", PRELN),
    ("residual scores are better than residual q and k", HERE, REALFORMER, "ResidualQK"),
    *(
        (f"{name} are better than {other}", HERE, row, other)
        for row, name in (("AttnRes", "attention residuals"), ("ValueResidual", "value residuals"))
        for other in (POSTLN, PRELN)
    ),
    ("residual values help beside residual q and k", COMMENTS, "ResidualQKV", "ResidualQK"),
    ("residual scores are better than residual q, k and v", COMMENTS, REALFORMER, "ResidualQKV"),
    (
        "a trained PostLN gains more by continuing as RealFormer than unmodified",
        *(COMMENTS, "RealFormer-from-PostLN", "PostLN-continued"),
    ),
)
"""A claim, its source, and two rows; at equal size, the first is claimed to be better."""


def claims(view: View) -> list[Claim]:
    """All claims on the table, the layers and the grid, those with one sentence together."""
    all_sizes = sizes(view)
    all_claims = [*_comparison_claims(all_sizes), *_stability_claims(grid(view))]
    for size in all_sizes:
        layers = int(max(view.values("layer", {SIZE: size, **DEPTH}), default=0))
        all_claims += _layer_claims(size, layers) if layers > 1 else []
    order = list(dict.fromkeys(claim.sentence for claim in all_claims))
    return sorted(all_claims, key=lambda claim: order.index(claim.sentence))


def _comparison_claims(all_sizes: list[str]) -> Iterator[Claim]:
    claim = partial(Claim, matters=MATTERS)

    def accuracy(row: str, size: str) -> Metric:
        return POINTS.at({**MASKED, "row": row, SIZE: size})

    for sentence, source, row, reference in COMPARED:
        margin = MATTERS if "at least as good" in sentence else 0.0
        for size in all_sizes:
            measured = f"{size}: {row} − {reference}, accuracy in points"
            gap = accuracy(row, size) - accuracy(reference, size)
            yield claim(sentence, gap, source, measured, margin=margin)
    for reference in (POSTLN, PRELN) if len(all_sizes) > 1 else ():
        small, large = all_sizes[0], all_sizes[-1]
        gains = [accuracy(row, large) - accuracy(row, small) for row in (REALFORMER, reference)]
        yield claim(
            "a larger model pays off with RealFormer more than without",
            gains[0] - gains[1],
            POST,
            f"{small} → {large}: RealFormer's gain − {reference}'s, accuracy in points",
        )
    for size in all_sizes:
        gains = [
            accuracy(f"{row}-shared", size) - accuracy(row, size) for row in (REALFORMER, POSTLN)
        ]
        yield claim(
            "sharing one block among all layers costs RealFormer less",
            gains[0] - gains[1],
            *(HERE, f"{size}: RealFormer − PostLN, points gained by sharing (negative: lost)"),
        )


def _layer_claims(size: str, count: int) -> Iterator[Claim]:
    """Claims on the layers of models: RealFormer − PostLN, or last − first layer."""
    metrics = {metric.name: replace(metric, digits=2) for metric in BY_LAYER.values()}

    def of_row(row: str, metric: Metric) -> Metric:
        return metric.at({**DEPTH, "row": row, SIZE: size})

    def gap(metric: Metric) -> Metric:
        return of_row(REALFORMER, metric) - of_row(POSTLN, metric)

    def mean_over(name: str, bins: slice = slice(None)) -> Metric:
        return replace(metrics[name], value=mean_of_bins).between(bins)

    def rise(name: str, first: int = 0) -> Metric:
        """The last layer − the one with the index `first`."""
        return metrics[name].between(slice(-1, None)) - metrics[name].between(
            slice(first, first + 1)
        )

    # Layer 1 has no layer below it, so there are `count` − 1 agreements; their upper half counts.
    upper, half = slice((count - 1) // 2, None), count // 2
    agrees = "attention of neighbouring layers agrees more, so that it converges"
    both = f"{REALFORMER} − {POSTLN},"
    for sentence, source, sign, metric, measured in (
        (
            "RealFormer's attention is sparser: its entropy is lower",
            *(PAPER, -1, gap(mean_over("entropy")), f"{both} entropy in nats, mean over layers"),
        ),
        (
            *(agrees, POST, 1, gap(mean_over("agreement", upper))),
            f"{both} agreement head by head, upper half",
        ),
        (
            *(agrees, POST, 1, gap(mean_over("agreement_mean", upper))),
            f"{both} agreement of mean heads, upper half",
        ),
        (
            "RealFormer's attention tends to one-hot with depth",
            *(POST, -1, of_row(REALFORMER, rise("entropy"))),
            "RealFormer, entropy in nats, last − first layer",
        ),
        (
            "leaving at half depth costs RealFormer less (models of adaptive depth, as FastBERT)",
            *(POST, -1, gap(rise("exit_accuracy", half - 1))),
            f"{both} points lost by leaving after layer {half} of {count}",
        ),
        (
            "PreLN's residual stream grows with depth",
            # Index 0 is the input of the first layer.
            *(XIONG, 1, of_row(PRELN, rise("variance", 1)), "PreLN, variance, last − first layer"),
        ),
        (
            "before training, PostLN's gradient is larger at the top than at the bottom",
            *(XIONG, 1, of_row(POSTLN, rise("gradients_start"))),
            "PostLN, gradient norm, top − bottom layer",
        ),
        (
            "residual scores bring the gradients of top and bottom closer together",
            *(POST, -1, gap(rise("gradients_start"))),
            f"{both} gradient norm before training, top − bottom layer",
        ),
    ):
        yield Claim(sentence, metric, source, f"{size}: {measured}", sign)


def _stability_claims(settings: Mapping[Setting, TrainingOutcome]) -> Iterator[Claim]:
    """Claims on which settings of the grid fail only with one row, or only without warm-up."""

    def failed(row: str, *warmup: bool) -> dict[tuple[Any, ...], bool]:
        """By what a row's settings vary, with warm-up (True) or without (False) where given."""
        return {
            setting[1 + len(warmup) :]: outcome != "learned"
            for setting, outcome in settings.items()
            if setting.row == row and bool(setting.warmup) in (warmup or (True, False))
        }

    stable, less = "RealFormer stabilises training", "RealFormer needs warm-up less than PostLN"
    easy = "RealFormer is as easy to train as PreLN (it does not fail in more settings)"
    warm = "PostLN needs warm-up (it fails in more settings without)"
    real, post, pre = map(failed, (REALFORMER, POSTLN, PRELN))
    cold, cold_post = failed(REALFORMER, False), failed(POSTLN, False)
    for sentence, source, sign, name, first, other, second in (
        (stable, PAPER, -1, REALFORMER, real, POSTLN, post),
        (easy, POST, -1, REALFORMER, real, PRELN, pre),
        (warm, POST, 1, "PostLN without warm-up", cold_post, "with", failed(POSTLN, True)),
        (less, POST, -1, "without warm-up: RealFormer", cold, POSTLN, cold_post),
    ):
        pairs = [(first[key], second[key]) for key in first if key in second]
        counts = [sum(pair[side] for pair in pairs) for side in (0, 1)]
        only = pairs.count((True, False)), pairs.count((False, True))
        if pairs:
            gap = Estimate(float(counts[0] - counts[1]), p=sign_test(*only), count=len(pairs))
            yield Claim(
                *(sentence, None, source),
                f"grid, settings that failed: {name} {counts[0]} − {other} {counts[1]} of "
                f"{len(pairs)} (only one of them: {only[0]}, {only[1]})",
                sign,
                test=partial(lambda gap, view: gap, gap),
                digits=0,
            )


# Figures

PANELS = {
    "residual scores": (
        *("RealFormer-PreLN", "ResidualQK", "ResidualQKV", "ValueResidual", "RealFormer-mean"),
        "RealFormer-half",
    ),
    "placements": ("AttnRes", "DeepNorm", "ReZero", "ReZeroNoNorm", "FixedScale"),
    "from a trained PostLN": ("PostLN-continued", "RealFormer-from-PostLN"),
    "one block for all layers": ("PostLN-shared", "RealFormer-shared"),
}
"""The rows of each panel, by its title; every panel also has PostLN, RealFormer and PreLN."""


def figures(view: View) -> Iterator[Figure]:
    """A figure for each statistic by layer, with a panel for each size and trained group."""
    for name, metric in BY_LAYER.items():
        panels = []
        for size in sizes(view):
            trained = names(view, size)
            for number, (title, group) in enumerate(PANELS.items()):
                if number and not {*group} & {*trained}:
                    continue
                where = {SIZE: size, **DEPTH}
                curves = {
                    row: bin_points(view, metric, {**where, "row": row}, lambda bin_: bin_[0])
                    for row in (POSTLN, REALFORMER, PRELN, *group)
                    if row in trained
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
    "dropouts and warm-up. Measures accuracy on masked tokens of held-out text, and attention "
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
                    *("gain", "difference to PostLN"),
                    ACCURACY.at(MASKED) - ACCURACY.at(MASKED, variant=POSTLN),
                ),
                Column("loss", "loss", LOSS.at(MASKED)),
                _training_column("planned_steps", "steps"),
                _training_column("learning_rate", "learning rate", 4),
                _training_column("parameters", "parameters"),
                text_column("seeds", "seeds", _seeds),
            ),
            head="configuration",
            intro="A masked language model's accuracy (in %) and loss (in nats) on masked tokens "
            "of held-out text, with 95 % intervals over documents and seeds. All models have the "
            "same texts and masked tokens, so differences (in points) are paired.",
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
            head="configuration",
            intro="Every layer of each configuration; layer 0 is the input of the first layer. "
            "Intervals are in layers.csv and in the figures.",
            notes=(
                "Accuracy after the layer: on masked tokens, through a separate exit (a norm and a "
                "matrix, trained on detached vectors) and the shared head; after the last layer, "
                "the model's.",
                "Agreement: the overlap of a layer's attention with that of the layer below, "
                "Σ_j min(α, α′), mean over tokens.",
                "Gradient norm: of the loss with respect to a layer's parameters on held-out text, "
                "over batches and seeds. None where layers share their weights.",
            ),
        ),
        Table(
            "grid",
            "Every setting of the grid",
            lambda view: [Row(setting.row, setting.where) for setting in grid(view)],
            (
                _factor_column(WARMUP, "warm-up (steps)"),
                _factor_column(RATE, "learning rate"),
                _factor_column(DROPOUT, "dropout"),
                text_column("state", "outcome", lambda view, row: state(view, row.where)),
                Column("loss", "loss", LOSS),
            ),
            head="configuration",
            intro="Held-out loss at each learning rate and dropout, with and without warm-up. "
            "Diverged: the loss is no longer finite. Stuck: it ends less than "
            f"{MARGIN:g} nats below that of the unigram baseline.",
        ),
    ),
    claims=claims,
    figures=figures,
    summary=in_short,
    collect=partial(collect_measurements, factors=("size",)),
    variants_help="Configurations, separated by commas; skips the robustness grid. [default: all]",
    examples=(
        ("--variants PostLN,RealFormer --seeds 5", "two configurations, five seeds"),
        ("--preset gpu-base --corpus my-text/ --plan", "the cost of BERT-Base"),
    ),
)

"""Do residual attention scores make a better encoder? (RealFormer, arXiv 2012.11747, kexue 8027)

Masked language models that differ in where norms stand and in whether scores are summed from layer
to layer are trained alike. They are compared in what they predict, in what happens layer by layer,
and in the learning rates and dropouts that they tolerate, with and without warm-up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from normattn.lab.evaluation.masked import MARGIN
from normattn.lab.report.tables import Column, Row, Table, shown, text_column
from normattn.lab.report.view import View
from normattn.lab.stats.measurements import FACTOR
from normattn.lab.stats.metrics import mean
from normattn.lab.studies import realformer_report as report
from normattn.lab.studies.base import Study
from normattn.lab.studies.realformer_runs import ROWS, Encoder, EncoderRun, GridRun, resolve
from normattn.lab.sweep.collect import measured_below
from normattn.score import ScoreSpec

# Columns

SIZES = text_column("size", "size", lambda view, row: row.where[report.SIZE])


def _rows(view: View) -> list[Row]:
    return [
        Row(name, {"row": name, report.SIZE: size})
        for size in report.sizes(view)
        for name in report.names(view, size)
    ]


def _layer_rows(view: View) -> list[Row]:
    """Each layer of each row; 0 is what the first layer reads."""
    return [
        Row(row.label, {**row.where, "layer": layer})
        for row in _rows(view)
        for layer in sorted(view.values("layer", {**row.where, **report.DEPTH}))
    ]


def _fact(name: str, title: str, digits: int = 0) -> Column:
    """A number of the training; all seeds of a row have the same."""
    return Column(name, title, mean(name, title, digits).at(report.TRAINING), interval=False)


def _seeds(view: View, row: Row) -> str:
    return ", ".join(map(str, sorted(view.values("seed", {**row.where, **report.MASKED}))))


def _of_row(key: str, title: str, text: Callable[[Encoder], str]) -> Column:
    """What the study says of a row; nothing of one that it no longer has."""
    return text_column(
        key, title, lambda view, row: text(ROWS[row.label]) if row.label in ROWS else None
    )


def _score(view: View, row: Row) -> str | None:
    score = view.one("score", {**row.where, **report.MASKED})
    return None if score is None else ScoreSpec.parse(score).variant_name


def _varied(factor: str, title: str) -> Column:
    key = factor.removeprefix(FACTOR)
    return text_column(key, title, lambda view, row: f"{row.where[factor]:g}")


def _notes(view: View) -> tuple[str, ...]:
    """What stands behind the numbers, and what the rows are."""
    behind = []
    for row in _rows(view)[:1]:
        unigram = view.estimate(report.UNIGRAM, {**row.where, **report.MASKED})
        assert unigram is not None
        behind.append(
            f"Behind each value: {unigram.units} documents, {unigram.count:,} hidden tokens. The "
            f"unigram baseline has a loss of {unigram.value:.3f}."
        )
    return (
        *behind,
        "RealFormer: PostLN, and every layer adds its scores to those of the layers below; -mean: "
        "softmax reads their mean; -PreLN: the same under PreLN; -half: half the steps, with a "
        "schedule of its own that ends there.",
        "ResidualQK: PostLN, and every layer adds its queries and keys to those below; "
        "ResidualQKV: its values too; ValueResidual: values alone, mixed with the lowest layer's.",
        "AttnRes: each sub-layer reads a softmax-weighted mean of all outputs below it.",
        "-continued and -from-PostLN: the trained PostLN, and half the steps more, unmodified or "
        "as RealFormer.",
        "ReZero: x + α·f(N(x)), α = 0 at first; ReZeroNoNorm: x + α·f(x); FixedScale: x + 0.1·f(x),"
        " both without any norm.",
        "-shared: one block's weights for all layers (ALBERT).",
    )


def in_short(view: View) -> list[str]:
    """What RealFormer is worth beside PostLN and PreLN, at every size."""
    sentences = []
    for size in report.sizes(view):
        at = report.ACCURACY.at({report.SIZE: size, **report.MASKED})
        gaps = {
            other: at.at(row=report.REALFORMER) - at.at(row=other)
            for other in (report.POSTLN, report.PRELN)
        }
        known = {other: view.known(gap) for other, gap in gaps.items()}
        parts = [f"{name} {shown(gap, 2, signed=True)}" for name, gap in known.items() if gap]
        if parts:
            sentences.append(
                f"RealFormer's accuracy on hidden tokens at size {size}, in points, relative to "
                f"{', '.join(parts)}."
            )
    return sentences


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
    runs=(EncoderRun, GridRun),
    tables=(
        Table(
            "table",
            "",
            _rows,
            (
                SIZES,
                Column("accuracy", "accuracy", report.ACCURACY.at(report.MASKED)),
                Column(
                    *("gain", "− PostLN"),
                    report.ACCURACY.at(report.MASKED)
                    - report.ACCURACY.at(report.MASKED, variant=report.POSTLN),
                ),
                Column("loss", "loss", report.LOSS.at(report.MASKED)),
                _fact("planned_steps", "steps"),
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
            "settings",
            "What each row is",
            _rows,
            (
                SIZES,
                _of_row("placement", "placement", lambda row: row.placement),
                text_column("score", "score", _score),
                _of_row("shared", "one block", lambda row: "yes" if row.shared else "no"),
                _fact("layers", "layers"),
                _fact("dim", "width"),
                _fact("learning_rate", "learning rate", 4),
                _fact("dropout", "dropout", 2),
                _fact("warmup", "warm-up (steps)"),
            ),
            head="row",
        ),
        Table(
            "layers",
            "Layer by layer",
            _layer_rows,
            (
                SIZES,
                text_column("layer", "layer", lambda view, row: row.where["layer"]),
                *(
                    Column(m.name, m.title, m.at(report.DEPTH), interval=False)
                    for m, *_ in report.BY_LAYER
                ),
            ),
            head="row",
            intro="Every layer of each configuration; layer 0 is the input of the first layer. "
            "Intervals are in layers.csv and in the figures.",
            notes=(
                "accuracy after it: hidden tokens predicted right from the layer's output, through "
                "an exit of its own (a norm and a matrix, trained on detached vectors) and the "
                "shared head; after the last layer by the model itself.",
                "variance: over the features, mean over tokens. Entropy: mean over heads and "
                "tokens; ln n is uniform.",
                "agreement: the share of the weights that a layer's attention has in common with "
                "that of the layer below, Σ_j min(α, α′), mean over tokens.",
                "gradient norm: of the loss by a layer's parameters on held-out text; its "
                "intervals are over batches and seeds. Layers that share their weights have no "
                "gradient of their own.",
            ),
        ),
        Table(
            "grid",
            "Every setting of the grid",
            lambda view: [Row(setting.row, setting.where) for setting in report.grid(view)],
            (
                _varied(report.WARMUP, "warm-up (steps)"),
                _varied(report.RATE, "learning rate"),
                _varied(report.DROPOUT, "dropout"),
                text_column("state", "outcome", lambda view, row: report.state(view, row.where)),
                Column("loss", "loss", report.LOSS),
            ),
            head="row",
            intro="Held-out loss at each learning rate and dropout, with and without warm-up. "
            "diverged: the loss stopped being finite; stuck: it ends less than "
            f"{MARGIN:g} nats below that of the unigram baseline.",
        ),
    ),
    claims=report.claims,
    figures=report.figures,
    summary=in_short,
    collect=partial(measured_below, factors=("size",)),
    variants_help="Configurations, separated by commas; skips the robustness grid. [default: all]",
    examples=(
        ("--preset smoke", "a quick test of the whole study"),
        ("", "the full study; `--plan` estimates its time"),
        ("--variants PostLN,RealFormer --seeds 5", "two configurations, five seeds"),
        ("--preset gpu-base --corpus my-text/ --plan", "the cost of BERT-Base"),
    ),
)

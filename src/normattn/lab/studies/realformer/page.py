"""The study's page: the table, what each row is, layer by layer, the robustness grid."""

from __future__ import annotations

from collections.abc import Callable

from normattn.lab.evaluation.masked import MARGIN
from normattn.lab.report.page import Page
from normattn.lab.report.table import NOTHING, Cell, Column, Row, Table
from normattn.lab.report.table import shown as shown_estimate
from normattn.lab.report.view import View
from normattn.lab.stats.measurements import FACTOR
from normattn.lab.stats.metrics import mean
from normattn.lab.studies.realformer.claims import claims
from normattn.lab.studies.realformer.figures import figures
from normattn.lab.studies.realformer.reading import (
    ACCURACY,
    BY_LAYER,
    DROPOUT,
    LOSS,
    POSTLN,
    PRELN,
    RATE,
    REALFORMER,
    SIZE,
    UNIGRAM,
    WARMUP,
    grid,
    masked,
    names,
    outcome,
    sizes,
)
from normattn.lab.studies.realformer.settings import ROWS
from normattn.lab.studies.realformer.settings import Row as Trained
from normattn.score import ScoreSpec

_MASKED, _TRAINING, _DEPTH = ({"protocol": name} for name in ("masked", "training", "depth"))


def _rows(view: View) -> list[Row]:
    return [
        Row(name, {"row": name, SIZE: size}) for size in sizes(view) for name in names(view, size)
    ]


def _text(said: Callable[[View, Row], object]) -> Callable[[View, Row], Cell]:
    return lambda view, row: Cell(str(said(view, row)))


_SIZE = Column("size", "size", plain=_text(lambda view, row: row.where[SIZE]))


def _seeds(view: View, row: Row) -> str:
    return ", ".join(map(str, sorted(view.values("seed", {**row.where, **_MASKED}))))


def _fact(name: str, title: str, digits: int = 0) -> Column:
    """A number of the training; all seeds of a row have the same."""
    return Column(name, title, mean(name, title, digits).at(_TRAINING), interval=False)


COLUMNS = (
    _SIZE,
    Column("accuracy", "accuracy", ACCURACY.at(_MASKED)),
    Column("gain", "− PostLN", ACCURACY.at(_MASKED) - ACCURACY.at(_MASKED, variant=POSTLN)),
    Column("loss", "loss", LOSS.at(_MASKED)),
    _fact("planned_steps", "steps"),
    _fact("parameters", "parameters"),
    Column("seeds", "seeds", plain=_text(_seeds)),
)


def _notes(view: View) -> tuple[str, ...]:
    """What stands behind the numbers, and what the rows are."""
    behind = []
    for row in _rows(view)[:1]:
        unigram = view.estimate(UNIGRAM, {**row.where, **_MASKED})
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
        "ResidualQKV: its values too.",
        "-continued and -from-PostLN: the trained PostLN, and half the steps more, as it is or as "
        "RealFormer.",
        "ReZero: x + α·f(N(x)), α = 0 at first; ReZeroNoNorm: x + α·f(x); FixedScale: x + 0.1·f(x),"
        " both without any norm.",
        "-shared: one block's weights for all layers (ALBERT).",
    )


def _setting(said: Callable[[Trained], object]) -> Callable[[View, Row], Cell]:
    """What the study's value says of a row; nothing of one that it no longer has."""

    def cell(view: View, row: Row) -> Cell:
        trained = ROWS.get(row.label)
        return NOTHING if trained is None else Cell(str(said(trained)))

    return cell


def _score(view: View, row: Row) -> Cell:
    score = view.one("score", {**row.where, **_MASKED})
    return NOTHING if score is None else Cell(ScoreSpec.parse(score).variant_name)


SETTINGS = (
    _SIZE,
    Column("placement", "placement", plain=_setting(lambda row: row.placement)),
    Column("score", "score", plain=_score),
    Column("shared", "one block", plain=_setting(lambda row: "yes" if row.shared else "no")),
    _fact("layers", "layers"),
    _fact("dim", "width"),
    _fact("learning_rate", "learning rate", 4),
    _fact("dropout", "dropout", 2),
    _fact("warmup", "warm-up (steps)"),
)


def _layer_rows(view: View) -> list[Row]:
    """Each layer of each row; 0 is what the first layer reads."""
    return [
        Row(row.label, {**row.where, "layer": layer})
        for row in _rows(view)
        for layer in sorted(view.values("layer", {**row.where, **_DEPTH}))
    ]


LAYERS = (
    _SIZE,
    Column("layer", "layer", plain=_text(lambda view, row: row.where["layer"])),
    *(
        Column(statistic.name, statistic.title, statistic.at(_DEPTH), interval=False)
        for statistic in BY_LAYER
    ),
)


def _grid_rows(view: View) -> list[Row]:
    return [Row(setting.row, setting.where) for setting in grid(view)]


def _varied(factor: str, title: str) -> Column:
    said = _text(lambda view, row: f"{row.where[factor]:g}")
    return Column(factor.removeprefix(FACTOR), title, plain=said)


GRID = (
    _varied(WARMUP, "warm-up (steps)"),
    _varied(RATE, "learning rate"),
    _varied(DROPOUT, "dropout"),
    Column("state", "outcome", plain=_text(lambda view, row: outcome(view, row.where).state)),
    Column("loss", "loss", LOSS),
)


def _failure_rows(view: View) -> list[Row]:
    return [Row(row, {"row": row}) for row in dict.fromkeys(setting.row for setting in grid(view))]


def _failures(warm: bool) -> Callable[[View, Row], Cell]:
    def cell(view: View, row: Row) -> Cell:
        own = [
            end.failed
            for setting, end in grid(view).items()
            if setting.row == row.label and (setting.warmup > 0) == warm
        ]
        return Cell(f"{sum(own)} of {len(own)}") if own else NOTHING

    return cell


FAILURES = (
    Column("warm", "failed with warm-up", plain=_failures(warm=True)),
    Column("cold", "failed without", plain=_failures(warm=False)),
)


def in_short(view: View) -> list[str]:
    """What RealFormer is worth beside PostLN and PreLN, at every size."""
    sentences = []
    for size in sizes(view):
        shown = []
        for other in (POSTLN, PRELN):
            ours, theirs = (ACCURACY.at(masked(row, size)) for row in (REALFORMER, other))
            difference = view.known(ours - theirs)
            if difference is not None:
                shown.append(f"{other} {shown_estimate(difference, 2, signed=True)}")
        if shown:
            sentences.append(
                f"RealFormer's accuracy on hidden tokens at size {size}, in points above: "
                f"{', '.join(shown)}."
            )
    return sentences


PAGE = Page(
    title="Residual scores and where norms stand",
    question="Does adding each layer's attention scores to those of the layers below make a better "
    "encoder than PostLN and PreLN, which settings does it tolerate, and what changes inside?",
    sources=("arXiv 2012.11747", "kexue.fm/archives/8027", "arXiv 2002.04745"),
    tables=(
        Table(
            "table",
            "",
            _rows,
            COLUMNS,
            head="row",
            intro="A masked language model's accuracy (in %) and loss (in nats) on hidden tokens "
            "of held-out text, with 95 % intervals over documents and seeds. All models read the "
            "same texts with the same tokens hidden, so that differences (in points) are paired.",
            notes=_notes,
        ),
        Table("settings", "What each row is", _rows, SETTINGS, head="row"),
        Table(
            "layers",
            "Layer by layer",
            _layer_rows,
            LAYERS,
            head="row",
            intro="Every layer of each row; layer 0 is what the first layer reads. The intervals "
            "are in layers.csv and in the figures.",
            notes=(
                "accuracy after it: hidden tokens that are hit after the layer, by an exit of its "
                "own (a norm and a matrix, trained beside the model on detached vectors) and the "
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
            "robustness",
            "Robustness to learning rate and dropout",
            _failure_rows,
            FAILURES,
            head="row",
            intro="Settings of the grid that failed. diverged: the loss stopped being finite; "
            f"stuck: it ends less than {MARGIN:g} nats below that of the unigram baseline.",
        ),
        Table(
            "grid",
            "Every setting of the grid",
            _grid_rows,
            GRID,
            head="row",
            intro="Held-out loss at each learning rate and dropout, with and without warm-up.",
        ),
    ),
    claims=claims,
    figures=figures,
    summary=in_short,
)

"""Do residual attention scores make a better encoder? (RealFormer, arXiv 2012.11747, kexue 8027)

Masked language models that differ in where norms stand and in whether scores are summed from layer
to layer are trained alike. They are compared in what they predict, in what happens layer by layer,
and in the learning rates and dropouts that they tolerate, with and without warm-up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from normattn.errors import InputError
from normattn.lab.data import TokenData
from normattn.lab.evaluation.masked import MARGIN
from normattn.lab.report.tables import Column, Row, Table, shown, text_column
from normattn.lab.report.view import View
from normattn.lab.stats.measurements import FACTOR
from normattn.lab.stats.metrics import mean
from normattn.lab.studies.base import Study
from normattn.lab.studies.preset import opened_as
from normattn.lab.studies.realformer_report import (
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
    claims,
    figures,
    grid,
    masked,
    names,
    outcome,
    sizes,
)
from normattn.lab.studies.realformer_runs import (
    ROWS,
    Encoder,
    EncoderRun,
    GridRun,
    RealFormerPreset,
    ScoringSettings,
    held_out,
    known_rows,
    row_training,
)
from normattn.lab.sweep.collect import measured_below
from normattn.lab.sweep.config import SweepConfig
from normattn.lab.sweep.paths import RunPaths
from normattn.lab.sweep.run import Request, Run, Sweep
from normattn.score import ScoreSpec

NOWHERE = RunPaths.of(Path("nowhere"), "none", 0)


def resolve(request: Request) -> Sweep:
    """The study that a request asks for; `--variants` choose rows, and then there is no grid.

    Raises `InputError` for settings that cannot be, unknown rows and methods.
    """
    preset = opened_as(request, "realformer", RealFormerPreset)
    request.refuse_choices("realformer")
    training = {size: preset.whole_training(size) for size in preset.sizes}
    if preset.grid.size not in training:
        raise InputError(f"grid.size is {preset.grid.size}; there are {', '.join(training)}")
    runs = [*_table(request, preset, training), *_grid(request, preset, training)]
    if not runs:
        raise InputError("none of the rows that were asked for is trained at any size")
    # Seeds cost the same. The longest come first, so that no core waits for them at the end.
    flops = {
        run.variant: sum(stage.cost().flops for stage in run.stages(NOWHERE))
        for run in {run.variant: run for run in runs}.values()
    }
    runs.sort(key=lambda run: -flops[run.variant])
    config = SweepConfig.of(
        preset.name,
        training=training,
        sizes=preset.sizes,
        grid=preset.grid,
        evaluation=preset.evaluation,
    )
    return Sweep.of(
        request, "realformer", config, runs, describe=_describe, facts=_facts(preset, runs)
    )


def _table(
    request: Request, preset: RealFormerPreset, training: Mapping[str, dict[str, Any]]
) -> Iterator[EncoderRun]:
    wanted = known_rows(request.variants or ROWS, "--variants")
    for size, settings in preset.sizes.items():
        for row in tuple(ROWS) if settings.rows is None else settings.rows:
            if row not in wanted:
                continue
            start = ROWS[row].start
            run = _run(
                EncoderRun,
                *(row, size, f"{size}-{row}", preset.evaluation),
                row_training(training[size], row, settings.rates),
                start=row_training(training[size], start, settings.rates) if start else None,
            )
            for seed in request.seeds_or(settings.seeds or preset.seeds):
                yield run.model_copy(update={"seed": seed})


def _grid(
    request: Request, preset: RealFormerPreset, training: Mapping[str, dict[str, Any]]
) -> Iterator[EncoderRun]:
    grid, evaluation = preset.grid, preset.evaluation
    for row in grid.rows if request.variants is None else ():
        own = row_training(training[grid.size], row)
        run = _run(GridRun, row, grid.size, f"grid-{row}", evaluation, own, grid=grid)
        for seed in range(grid.seeds):
            yield run.model_copy(update={"seed": seed})


def _run(
    kind: type[EncoderRun],
    row: str,
    size: str,
    variant: str,
    evaluation: ScoringSettings,
    training: dict[str, Any],
    **own: Any,
) -> EncoderRun:
    """A run of a row at a size, for seed 0; its score is that of the trained model."""
    made = kind(
        variant=variant,
        row=row,
        factors={"size": size},
        seed=0,
        size=size,
        training=training,
        evaluation=evaluation,
        **own,
    )
    return made.model_copy(update={"score": str(made.own_config.model.score)})


def _facts(preset: RealFormerPreset, runs: Sequence[EncoderRun]) -> tuple[tuple[str, str], ...]:
    models = {run.size: run.training["model"] for run in runs}
    named = [
        f"{size}: {models[size]['layers']} layers of width {models[size]['dim']}"
        for size in preset.sizes
        if size in models
    ]
    facts = [("sizes", "; ".join(named))]
    if any(isinstance(run, GridRun) for run in runs):
        grid = preset.grid
        settings = 2 * len(grid.rates) * len(grid.dropouts)
        facts.append(("robustness grid", f"{len(grid.rows)} rows, {settings} settings each"))
    return tuple(facts)


def _describe(run: Run, data: TokenData) -> list[str]:
    assert isinstance(run, EncoderRun)
    texts = held_out(data, run.training_config, run.evaluation)
    if isinstance(run, GridRun):
        return []
    corpus = run.training_config.data.corpus
    return [
        f"corpus {corpus}: {data.train.total:,} training tokens in {len(data.train):,} documents; "
        f"{len(texts)} texts of {len(set(texts.documents))} held-out documents are scored"
    ]


# Tables

MASKED, TRAINING, DEPTH = ({"protocol": name} for name in ("masked", "training", "depth"))
SIZES = text_column("size", "size", lambda view, row: row.where[SIZE])


def _rows(view: View) -> list[Row]:
    return [
        Row(name, {"row": name, SIZE: size}) for size in sizes(view) for name in names(view, size)
    ]


def _seeds(view: View, row: Row) -> str:
    return ", ".join(map(str, sorted(view.values("seed", {**row.where, **MASKED}))))


def _fact(name: str, title: str, digits: int = 0) -> Column:
    """A number of the training; all seeds of a row have the same."""
    return Column(name, title, mean(name, title, digits).at(TRAINING), interval=False)


def _notes(view: View) -> tuple[str, ...]:
    """What stands behind the numbers, and what the rows are."""
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
        "softmax reads their mean; -PreLN: the same under PreLN; -half: half the steps, with a "
        "schedule of its own that ends there.",
        "ResidualQK: PostLN, and every layer adds its queries and keys to those below; "
        "ResidualQKV: its values too; ValueResidual: values alone, mixed with the lowest layer's.",
        "AttnRes: each sub-layer reads a softmax-weighted mean of all outputs below it.",
        "-continued and -from-PostLN: the trained PostLN, and half the steps more, as it is or as "
        "RealFormer.",
        "ReZero: x + α·f(N(x)), α = 0 at first; ReZeroNoNorm: x + α·f(x); FixedScale: x + 0.1·f(x),"
        " both without any norm.",
        "-shared: one block's weights for all layers (ALBERT).",
    )


def _of_row(text: Callable[[Encoder], str]) -> Callable[[View, Row], str | None]:
    """What the study's value says of a row; nothing of one that it no longer has."""
    return lambda view, row: text(ROWS[row.label]) if row.label in ROWS else None


def _score(view: View, row: Row) -> str | None:
    score = view.one("score", {**row.where, **MASKED})
    return None if score is None else ScoreSpec.parse(score).variant_name


def _layer_rows(view: View) -> list[Row]:
    """Each layer of each row; 0 is what the first layer reads."""
    return [
        Row(row.label, {**row.where, "layer": layer})
        for row in _rows(view)
        for layer in sorted(view.values("layer", {**row.where, **DEPTH}))
    ]


def _varied(factor: str, title: str) -> Column:
    return text_column(
        factor.removeprefix(FACTOR), title, lambda view, row: f"{row.where[factor]:g}"
    )


def in_short(view: View) -> list[str]:
    """What RealFormer is worth beside PostLN and PreLN, at every size."""
    sentences = []
    for size in sizes(view):
        differences = []
        for other in (POSTLN, PRELN):
            ours, theirs = (ACCURACY.at(masked(row, size)) for row in (REALFORMER, other))
            difference = view.known(ours - theirs)
            if difference is not None:
                differences.append(f"{other} {shown(difference, 2, signed=True)}")
        if differences:
            sentences.append(
                f"RealFormer's accuracy on hidden tokens at size {size}, in points above: "
                f"{', '.join(differences)}."
            )
    return sentences


STUDY = Study(
    "realformer",
    "Does adding each layer's attention scores to those of the layers below make a better "
    "encoder than PostLN and PreLN, which settings does it tolerate, and what changes inside?",
    title="Residual scores and where norms stand",
    help="Residual scores beside the placements of the norm, in masked language models.\n\n"
    "Trains an encoder in each placement, at equal and at half the steps, over learning rates and "
    "dropouts, with and without warm-up; scores each on hidden tokens of held-out text and "
    "measures it layer by layer.",
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
                Column("accuracy", "accuracy", ACCURACY.at(MASKED)),
                Column(
                    *("gain", "− PostLN"),
                    ACCURACY.at(MASKED) - ACCURACY.at(MASKED, variant=POSTLN),
                ),
                Column("loss", "loss", LOSS.at(MASKED)),
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
                text_column("placement", "placement", _of_row(lambda row: row.placement)),
                text_column("score", "score", _score),
                text_column("shared", "one block", _of_row(lambda r: "yes" if r.shared else "no")),
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
                *(Column(m.name, m.title, m.at(DEPTH), interval=False) for m in BY_LAYER),
            ),
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
            "grid",
            "Every setting of the grid",
            lambda view: [Row(setting.row, setting.where) for setting in grid(view)],
            (
                _varied(WARMUP, "warm-up (steps)"),
                _varied(RATE, "learning rate"),
                _varied(DROPOUT, "dropout"),
                text_column("state", "outcome", lambda view, row: outcome(view, row.where).state),
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
    variants_help="Rows, by commas; then there is no robustness grid. [default: all]",
    examples=(
        ("--preset smoke", "the whole path, small"),
        ("", "the study itself; --plan says how long it takes here"),
        ("--variants PostLN,RealFormer --seeds 5", "two rows, five models each"),
        ("--preset gpu-base --corpus my-text/ --plan", "BERT-Base: its cost"),
    ),
)

"""Do normalised queries and keys translate better and tolerate high learning rates? (QK-Norm)

The source claims 28.5 → 29.2 BLEU for QK-Norm in translation, and stability. Three experiments: a
translation model with each score (BLEU, chrF, loss), a learning-rate sweep (some scores at ×1 …
×32 of the learning rate: final loss, largest logit, attention entropy) and, where the preset has
them, the same scores in a small Vision Transformer (arXiv 2010.04245, 2302.05442).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl

from normattn.errors import InputError
from normattn.lab.data.pairs import PairData
from normattn.lab.diagnostics.lines import read_diagnostics
from normattn.lab.runs import read_status
from normattn.lab.stats import Identity, collected, identified, joined, sums
from normattn.lab.studies.qknorm.images import VisionCell, vision_cells
from normattn.lab.studies.qknorm.page import PAGE
from normattn.lab.studies.qknorm.rows import Trained, rows_of
from normattn.lab.studies.qknorm.settings import VARIED, QKNormPreset
from normattn.lab.studies.qknorm.translation import (
    RateCell,
    TranslateCell,
    TranslationSettings,
    rate_cells,
)
from normattn.lab.sweep.cell import read_cell
from normattn.lab.sweep.collect import history
from normattn.lab.sweep.layout import CellPaths
from normattn.lab.sweep.settings import merged
from normattn.lab.sweep.study import (
    Cell,
    Request,
    Study,
    Sweep,
    SweepConfig,
    cells_of,
    opened_as,
    refuse_choices,
    seeds_of,
    sweep_of,
)
from normattn.lab.training.tasks.translation import TranslationConfig, epochs

KIND = "qknorm"


class QKNormConfig(SweepConfig):
    """What every cell of the study shares; cells may be added, but this may not change."""

    training: dict[str, Any]
    evaluation: TranslationSettings
    rates: dict[str, Any] | None
    vision: dict[str, Any] | None


def resolve(request: Request) -> Sweep:
    """The study that a request asks for.

    `variants` are the rows; the learning-rate sweep and the Vision Transformers keep those of their
    own scores that are among them. Raises `InputError` for unknown settings, scores that cannot be
    trained, and choices that this study does not have.
    """
    preset = opened_as(request, KIND, QKNormPreset)
    refuse_choices(request, KIND)
    training = _whole(preset.training, f"preset {preset.name}, training")
    rates = None
    if preset.rates is not None:
        over = merged(preset.training, preset.rates.training)
        rates = _whole(over, f"preset {preset.name}, rates.training")
    images = preset.vision.training if preset.vision else None
    config = QKNormConfig.of(preset, training=training, rates=rates, vision=images)
    seeds = seeds_of(request, preset)
    rows = rows_of(request.variants or preset.scores, preset.trained_with)
    of_images = seeds
    if preset.vision is not None and preset.vision.seeds and not request.seeds:
        of_images = tuple(range(preset.vision.seeds))
    chosen = request.variants is not None
    cells = [*_all_cells(preset, config, rows, seeds, of_images, chosen)]
    for cell in cells:
        if cell.seed == seeds[0]:
            _ = cell.training_config  # What cannot be trained is refused now.
    return sweep_of(request, KIND, config, cells, _describe, _facts(training))


def _all_cells(
    preset: QKNormPreset,
    config: QKNormConfig,
    rows: Mapping[str, Trained],
    seeds: Sequence[int],
    images: Sequence[int],
    chosen: bool,
) -> Iterator[Cell]:
    """Rows, Vision Transformers, learning-rate sweep; `images` are the Vision Transformers' seeds.

    Where the rows were `chosen`, each experiment keeps those of its own scores among them.
    """

    def among(own: Sequence[str]) -> list[Trained]:
        every = rows_of(own, preset.trained_with)
        return [row for name, row in every.items() if not chosen or name in rows]

    trained = {name: {"training": row.over(config.training)} for name, row in rows.items()}
    yield from cells_of(TranslateCell, config, seeds, trained)
    if preset.vision is not None:
        training, rates = preset.vision.training, preset.vision.rates
        yield from vision_cells(training, among(preset.vision.scores), images)
        yield from vision_cells(training, among(rates.scores), seeds, rates.multiples)
    if preset.rates is not None and config.rates is not None:
        fewer = preset.evaluation.model_copy(update={"max_sentences": preset.rates.max_sentences})
        own = among(preset.rates.scores)
        yield from rate_cells(own, preset.rates.multiples, seeds, config.rates, fewer)


def _whole(training: Mapping[str, Any], subject: str) -> dict[str, Any]:
    """The settings with every default filled in, less what the tables vary."""
    varied = {"seed": 0, "model.score": "Baseline"}
    fields = TranslationConfig.parse(merged(training, varied), subject).model_dump(mode="json")
    del fields["seed"]
    for name in VARIED:
        del fields["model"][name]
    return fields


def _facts(training: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What is trained on what, for the plan."""
    model, data = training["model"], training["data"]
    vocabulary = f"{data['vocab_size']:,} words"
    if data["target_vocab_size"]:
        vocabulary += f" and {data['target_vocab_size']:,} of the target's own"
    return (
        ("sentence pairs", f"{Path(data['corpus']).name}, {data['source']} → {data['target']}"),
        (
            "model",
            f"width {model['dim']}, {model['layers']} + {model['decoder_layers']} layers, "
            f"{model['heads']} heads, {model['placement']}, {vocabulary}",
        ),
        (
            "training",
            f"{training['steps']:,} steps of {training['batch_tokens']:,} padded tokens, learning "
            f"rate {training['optimiser']['lr']:g}, dropout {model['dropout']:g}, label smoothing "
            f"{training['label_smoothing']:g}",
        ),
    )


def _describe(cell: Cell, data: Any) -> list[str]:
    config = cell.training_config
    if not isinstance(data, PairData) or not isinstance(config, TranslationConfig):
        return []
    seen = f"{config.steps:,} steps see each training pair {epochs(config, data):.1f} times"
    if isinstance(cell, RateCell):
        return [f"learning-rate sweep: {seen}"]
    return [f"corpus {config.data.corpus}: {data.facts()}", seen]


def collect(out: Path) -> pl.DataFrame:
    """Every measurement below `out`; of each training that ended, its loss, logits and entropy.

    Raises `InputError` where an experiment was tested on several data sets.
    """
    measured = collected(out)
    if measured.height:
        tested = measured.filter(pl.col("protocol") != "training")
        for protocol, count in tested.group_by("protocol").agg(pl.col("data").n_unique()).rows():
            if count > 1:
                raise InputError(
                    f"{out}: {protocol} was measured on {count} data sets; report them apart"
                )
    parts = [measured]
    for paths in CellPaths.below(out):
        run = paths.run
        status = read_status(run)
        if status is not None and status.state in ("finished", "diverged"):
            trained = read_cell(paths.settings, STUDY).identity("training")
            parts.append(history(run, trained.row, trained.seed, trained.factors))
            parts.append(_attention(trained, run))
    return joined(parts)


def _attention(trained: Identity, run: Path) -> pl.DataFrame:
    """By recorded step: the largest logit of any head, the entropy shares of all heads."""
    parts = []
    for line in read_diagnostics(run):
        largest = line.most("largest")
        shares = line.values("entropy_share")
        if largest is not None and shares:
            at: dict[str, Any] = {"axis": "step", "edges": [float(line.step)]}
            parts.append(sums("largest_logit", [""], [[largest]], [[1.0]], **at))
            parts.append(sums("entropy_share", [""], [[sum(shares)]], [[len(shares)]], **at))
    return identified(replace(trained, split="train"), parts) if parts else pl.DataFrame()


STUDY = Study(
    name=KIND,
    help="Train translation models with each score, a learning-rate sweep, and small Vision "
    "Transformers; tabulate and plot.\n\n"
    "Rows are added by running it again with other --variants or --seeds on the same OUT; "
    "another setting that a result depends on is refused. BLEU needs `pip install "
    "'normattn[translation]'`, the images `normattn[vision]`.",
    resolve=resolve,
    cells=(TranslateCell, RateCell, VisionCell),
    page=PAGE,
    variants="Scores of the table, by commas; the learning-rate sweep and the images keep theirs "
    "among them. [default: the preset's]",
    examples=(
        ("--preset smoke", "the whole path in about a minute"),
        ("", "the study itself on two cores"),
        ("--seeds 3", "with intervals over three models of each kind"),
        ("--variants Baseline,KNA --plan", "its cost"),
        ("--preset multi30k --corpus FOLDER", "three scores on multi30k, three seeds"),
    ),
    collect=collect,
)

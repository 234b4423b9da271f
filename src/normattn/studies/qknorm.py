"""QK-Norm: translation with every normalisation of the score, and who bears a high learning rate.

The source claims 28.5 → 29.2 BLEU for QK-Norm in translation, and stability. Three parts: rows (a
translation model with each score: BLEU, chrF, loss), a ladder (some scores at ×1 … ×32 of the
learning rate: final loss, largest logit, attention entropy) and, where the preset has them, the
same scores in a small Vision Transformer (arXiv 2010.04245, 2302.05442).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from normattn.data.pairs import PairData
from normattn.errors import InputError
from normattn.reports.diagnostics_records import read_diagnostics
from normattn.reports.history import draw_history
from normattn.reports.qknorm import qknorm_report
from normattn.reports.stability import LadderRun, Trace
from normattn.reports.translation_record import TranslationRecord, read_translation
from normattn.reports.translations import Ended
from normattn.reports.vision import vision_report
from normattn.runs import read_status
from normattn.score import ScoreSpec
from normattn.studies._qknorm_settings import SCORES, VARIED, QKNormPreset
from normattn.studies._tabulate import origin, say_where
from normattn.studies._translation import (
    RECORD,
    LadderCell,
    TranslateCell,
    TranslationCell,
    TranslationSettings,
    ladder_cells,
)
from normattn.studies._vision import VisionCell, vision_cells, vision_records, vision_setting
from normattn.sweep.layout import CellPaths, peek
from normattn.sweep.merging import merged
from normattn.sweep.settings import validated
from normattn.sweep.study import (
    Cell,
    Request,
    Sweep,
    SweepConfig,
    opened_as,
    place_of,
    refuse_choices,
    seeds_of,
)
from normattn.training.translation import TranslationConfig, epochs

KIND = "qknorm"


class QKNormConfig(SweepConfig):
    """What every cell of the study shares; cells may be added, but this may not change."""

    training: dict[str, Any]
    evaluation: TranslationSettings
    ladder: dict[str, Any] | None
    vision: dict[str, Any] | None


def resolve(request: Request) -> Sweep:
    """The study that a request asks for.

    `variants` are the rows; the ladder and the Vision Transformers keep those of their own scores
    that are among them. Raises `InputError` for unknown settings, scores that cannot be trained,
    and choices that this study does not have.
    """
    preset = opened_as(request, KIND, QKNormPreset)
    refuse_choices(request, KIND)
    training = _whole(preset.training, f"preset {preset.name}, training")
    ladder = None
    if preset.ladder is not None:
        over = merged(preset.training, preset.ladder.training)
        ladder = _whole(over, f"preset {preset.name}, ladder.training")
    config = QKNormConfig(
        preset=preset.name,
        training=training,
        evaluation=preset.evaluation,
        ladder=ladder,
        vision=preset.vision.training if preset.vision else None,
    )
    seeds = seeds_of(request, preset)
    scores = _canonical(request.variants or preset.scores)
    images = seeds
    if preset.vision is not None and preset.vision.seeds and not request.seeds:
        images = tuple(range(preset.vision.seeds))
    chosen = request.variants is not None
    cells = [*_all_cells(preset, config, scores, seeds, images, chosen)]
    for cell in cells:
        if cell.seed == seeds[0]:
            _ = cell.training_config  # What cannot be trained is refused now.
    return Sweep(
        study=KIND,
        config=config,
        cells=tuple(cells),
        skipped=(),
        out=place_of(request, KIND, preset),
        report=report,
        describe=_describe,
        facts=_facts(training),
    )


def _all_cells(
    preset: QKNormPreset,
    config: QKNormConfig,
    scores: Sequence[str],
    seeds: Sequence[int],
    images: Sequence[int],
    chosen: bool,
) -> Iterator[Cell]:
    """Rows, ladder, Vision Transformers; `images` are the seeds of these."""

    def among(own: Sequence[str]) -> list[str]:
        return [name for name in _canonical(own) if not chosen or name in scores]

    evaluation = preset.evaluation
    for seed in seeds:
        for score in scores:
            yield TranslateCell(
                variant=score, seed=seed, training=config.training, evaluation=evaluation
            )
    if preset.vision is not None:
        own, climbing = among(preset.vision.scores), among(preset.vision.ladder)
        yield from vision_cells(preset.vision.training, own, images)
        yield from vision_cells(preset.vision.training, climbing, seeds, preset.vision.rates)
    if preset.ladder is not None and config.ladder is not None:
        fewer = evaluation.model_copy(update={"max_sentences": preset.ladder.max_sentences})
        own = among(preset.ladder.scores)
        yield from ladder_cells(own, preset.ladder.rates, seeds, config.ladder, fewer)


def _whole(training: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The settings with every default filled in, less what the tables vary."""
    varied = {"seed": 0, "model.score": "Baseline"}
    fields = TranslationConfig.parse(merged(training, varied), what).model_dump(mode="json")
    del fields["seed"]
    for name in VARIED:
        del fields["model"][name]
    return fields


def _canonical(scores: Sequence[str]) -> tuple[str, ...]:
    """The scores by their printed names, each once; one with a method is no trained score."""
    found = []
    for name in scores:
        spec = ScoreSpec.parse(name)
        if spec.method:
            raise InputError(f"{name} holds {spec.method}, which is applied after training")
        found.append(str(spec).partition("@")[0])
    if len(set(found)) != len(found):
        raise InputError(f"a score is named twice: {', '.join(scores)}")
    return tuple(found)


def _facts(training: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What is trained on what, for the plan and the page."""
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
    if cell.kind == "ladder":
        return [f"ladder: {seen}"]
    return [f"corpus {config.data.corpus}: {data.facts()}", seen]


def report(out: Path) -> None:
    """Write the tables and the figures of what was measured in `out`."""
    records: list[TranslationRecord] = []
    ended: list[Ended] = []
    ladder: list[LadderRun] = []
    histories: dict[str, list[Path]] = {}
    setting: tuple[tuple[str, str], ...] = ()
    for paths, cell in _cells_of(out):
        record, failure = _outcome(paths, cell)
        if record is None and failure is None:
            continue  # Not yet trained.
        if isinstance(cell, LadderCell):
            ladder.append(_ladder_run(cell, paths, record, failure))
            continue
        setting = setting or _facts(cell.training_config.model_dump(mode="json"))
        records += [record] if record else []
        ended += [failure] if failure else []
        histories.setdefault(cell.variant, []).append(paths.run / "metrics.jsonl")
    figures, pages = _vision_page(out)
    figures += qknorm_report(
        records, ended, ladder, out, order=SCORES, setting=dict(setting), pages=pages
    )
    if histories:
        figures += draw_history(histories, out / "figures")
    say_where(out, len(figures))


def _vision_page(out: Path) -> tuple[list[Path], dict[str, str]]:
    """The Vision Transformers' page and figures, where any was trained."""
    images, failed = vision_records(out)
    if not images and not failed:
        return [], {}
    first = next(iter(sorted((out / "jobs").glob("vision */seed*/cell.json"))))
    setting = vision_setting(validated(VisionCell, peek(first), str(first)).training_config)
    figures = vision_report(images, failed, out, order=SCORES, setting=setting)
    return figures, {"vision.md": "the same scores in a small Vision Transformer"}


def _cells_of(out: Path) -> Iterator[tuple[CellPaths, TranslationCell]]:
    """The translation cells that were begun in a study's directory."""
    kinds: dict[str, type[TranslationCell]] = {"translate": TranslateCell, "ladder": LadderCell}
    for settings in sorted((out / "jobs").glob("*/seed*/cell.json")):
        fields = peek(settings)
        kind = kinds.get(str(fields.get("kind")))
        if kind is not None:
            yield CellPaths.of_job(settings.parent), validated(kind, fields, str(settings))


def _outcome(
    paths: CellPaths, cell: TranslationCell
) -> tuple[TranslationRecord | None, Ended | None]:
    """What a cell came to: a record, or how it ended in NaN; neither when it is not done."""
    if (paths.run / RECORD).is_file():
        return read_translation(paths.run / RECORD), None
    status = read_status(paths.run)
    if status is None or status.state != "diverged":
        return None, None
    return None, Ended(_score_of(cell), cell.seed, status.step, origin(status.message))


def _score_of(cell: TranslationCell) -> str:
    return cell.score if isinstance(cell, LadderCell) else cell.variant


def _ladder_run(
    cell: LadderCell, paths: CellPaths, record: TranslationRecord | None, failure: Ended | None
) -> LadderRun:
    rate = cell.training_config.optimiser.lr
    traces = tuple(_traces(paths.run))
    return LadderRun(cell.score, cell.rate, rate, cell.seed, record, failure, traces)


def _traces(run: Path) -> Iterator[Trace]:
    """What the probe saw in a training, over all layers and heads."""
    for line in read_diagnostics(run):
        largest, entropy = line.most("largest"), line.mean("entropy_share")
        if largest is not None and entropy is not None:
            yield Trace(line.step, largest, entropy)

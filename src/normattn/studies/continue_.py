"""The claim that a KeyNorm model needs nothing changed when training goes on at a longer length.

Each score is trained at L and then goes on at 4 L: KNA (and CosA, KNA-logn) as it is; Baseline as
it is, with PI and with ABF, the usual remedies. Every model is read at L, 4 L and 16 L, before and
along the way (kexue.fm/archives/9859).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from normattn.data import TokenData
from normattn.data.evaluation_sets import EvaluationSet, non_repeated_set, train_length_set
from normattn.errors import InputError
from normattn.evaluation import EvaluationStore
from normattn.reports import Divergence
from normattn.reports.continuation import continuation_report
from normattn.reports.records import Record
from normattn.score import ScoreSpec
from normattn.studies._tabulate import divergence, say_where
from normattn.sweep.language import (
    CausalCell,
    TextConfig,
    check_trainable,
    described,
    opened,
    shared_training,
)
from normattn.sweep.layout import CellPaths
from normattn.sweep.measuring import EVALUATIONS
from normattn.sweep.merging import merged
from normattn.sweep.reading import KeptStage
from normattn.sweep.settings import ContinueSettings, EvaluationSettings
from normattn.sweep.stages import UNKNOWN, Stage, TrainStage
from normattn.sweep.study import (
    Request,
    Sweep,
    place_of,
    refuse_choices,
    seeds_of,
)
from normattn.training import TrainingConfig

KIND = "continue"
GROUP = "continued"
VARIANTS = ("Baseline", "KNA", "KNA-logn", "CosA")
REMEDIES = ("PI", "ABF")
UNCHANGED = "as it is"


class ContinueConfig(TextConfig):
    """What the study's cells share: also how training goes on."""

    continued: ContinueSettings


class ContinueCell(CausalCell):
    """One score trained at L, and gone on with under each of `methods`."""

    kind: Literal["continue"] = "continue"
    methods: tuple[str, ...]
    continued: ContinueSettings

    @property
    def readings(self) -> int:
        """A row for every way of going on."""
        return len(self.methods)

    def after(self, paths: CellPaths) -> list[Stage]:
        """Go on under each method, and read what each run kept."""
        return [stage for method in self.methods for stage in self._branch(method, paths)]

    def _branch(self, method: str, paths: CellPaths) -> Iterator[Stage]:
        config = self._continued_config(method, paths)
        place = paths.continued / (method or UNCHANGED)
        length, settings = config.model.train_length, self.evaluation
        yield TrainStage(self.workload, config, place, essential=False)
        yield KeptStage(
            config=config,
            place=place,
            sets=lambda data: evaluation_sets(data, length, settings),
            lengths=tuple(length * multiple for multiple in settings.multiples),
            settings=settings,
            name=f"{self.variant}/seed{self.seed}/{method or UNCHANGED}",
        )

    def _continued_config(self, method: str, paths: CellPaths) -> TrainingConfig:
        length = self.training_config.model.train_length
        settings = self.continued
        changes: dict[str, Any] = {
            "steps": settings.steps,
            "keep": settings.keep,
            "batch_size": settings.batch_size,
            "optimiser.lr": settings.lr,
            "schedule.warmup_steps": settings.warmup_steps,
            "continued": {
                "start": str(paths.run / "model"),
                "weights": UNKNOWN,
                "method": method,
                "length": length * settings.multiple,
            },
        }
        fields = self.training_config.model_dump(mode="json")
        return TrainingConfig.parse(merged(fields, changes), f"the settings of {self.name}")


def resolve(request: Request) -> Sweep:
    """The study that a request asks for; raises `InputError` as `keynorm.resolve` does."""
    preset = opened(request, KIND, group=GROUP)
    refuse_choices(request, KIND, variants=False)
    training = shared_training(preset)
    continued = _with_batch_size(preset.continued, training["batch_size"])
    config = ContinueConfig(
        preset=preset.name,
        training=training,
        evaluation=preset.evaluation.model_copy(
            update={"multiples": continued.read, "protocols": ("train_length", "non_repeated")}
        ),
        continued=continued,
    )
    cells = []
    for seed in seeds_of(request, preset):
        for variant in VARIANTS:
            check_trainable(variant, config)
            cell = ContinueCell(
                variant=variant,
                seed=seed,
                methods=_methods(variant, continued.multiple),
                training=training,
                evaluation=config.evaluation,
                continued=continued,
            )
            cells.append(cell)
    out = place_of(request, KIND, preset)
    for stage in cells[0].stages(CellPaths.of(out, cells[0].variant, cells[0].seed)):
        _ = stage.cost  # Settings that cannot be are refused now, not after the first training.
    return Sweep(
        study=KIND,
        config=config,
        cells=tuple(cells),
        skipped=(),
        out=out,
        report=report,
        describe=described(
            lambda data: evaluation_sets(data, config.train_length, config.evaluation)
        ),
        facts=config.facts,
    )


def _with_batch_size(settings: ContinueSettings, before: int) -> ContinueSettings:
    """As many tokens a step as before, where nothing else is said."""
    if settings.batch_size is not None:
        return settings
    if before % settings.multiple:
        raise InputError(
            f"a batch of {before} sequences holds no whole number of sequences "
            f"{settings.multiple} times as long; give continued.batch_size"
        )
    return settings.model_copy(update={"batch_size": before // settings.multiple})


def _methods(variant: str, multiple: int) -> tuple[str, ...]:
    """Unchanged; the score without a norm also under each remedy."""
    if variant != "Baseline":
        return ("",)
    plain = ScoreSpec.parse(variant)
    texts = (str(plain.with_method(name).resolve(factor=multiple)) for name in REMEDIES)
    return ("", *(text.removeprefix("Baseline-") for text in texts))


def evaluation_sets(
    data: TokenData, train_length: int, settings: EvaluationSettings
) -> list[EvaluationSet]:
    """Natural text of each of the lengths, every token scored."""
    split, windows, seed = data.split(settings.split), settings.max_windows, settings.seed
    sets = [train_length_set(split, train_length, max_windows=windows, seed=seed)]
    for multiple in settings.multiples[1:]:
        sets.append(non_repeated_set(split, train_length, multiple, max_windows=windows, seed=seed))
    return sets


def report(out: Path) -> None:
    """Write the tables and the figure of what was measured in `out`."""
    found: list[tuple[str, int, Record]] = []
    diverged: list[tuple[str, Divergence]] = []
    for place in sorted((out / "continued").glob("*/seed*/*")):
        variant = place.parents[1].name
        row = variant
        if place.name != UNCHANGED:
            row += f" with {ScoreSpec.parse(variant).with_method(place.name).method}"
        for folder in sorted((place / EVALUATIONS).glob("step-*")):
            step = int(folder.name.removeprefix("step-"))
            records = EvaluationStore(folder).records()
            found += [(row, step, each) for each in records if isinstance(each, Record)]
        failed = divergence(place)
        diverged += [(row, failed)] if failed is not None else []
    say_where(out, len(continuation_report(found, diverged, out)))

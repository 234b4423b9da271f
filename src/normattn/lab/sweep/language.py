"""What the studies of causal language models share: their settings, cells and scores."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from normattn.errors import InputError
from normattn.lab.data import TokenData
from normattn.lab.evaluation import AnySet
from normattn.lab.sweep import presets
from normattn.lab.sweep.layout import CellPaths
from normattn.lab.sweep.measuring import evaluation_sets
from normattn.lab.sweep.methods import Omission, refusal
from normattn.lab.sweep.reading import AS_IS, ReadStage
from normattn.lab.sweep.settings import (
    STUDY_GROUPS,
    EvaluationSettings,
    Preset,
    merged,
    validated,
)
from normattn.lab.sweep.stages import Stage, TrainStage
from normattn.lab.sweep.study import (
    Cell,
    Request,
    Sweep,
    SweepConfig,
    cells_of,
    seeds_of,
    sweep_of,
)
from normattn.lab.training import TrainingConfig
from normattn.lab.training.tasks.text import CausalWorkload
from normattn.score import ScoreSpec

Own = TypeVar("Own", bound="TextConfig")
OwnPreset = TypeVar("OwnPreset", bound=Preset)


class TextConfig(SweepConfig):
    """What every cell of a study of language models shares.

    `training` is a whole `TrainingConfig` without the score and the seed.
    """

    training: dict[str, Any]
    evaluation: EvaluationSettings

    @classmethod
    def of_text(
        cls: type[Own], preset: Preset, read: Mapping[str, Any] | None = None, **own: Any
    ) -> Own:
        """What a preset says of it, but for what the study reads: settings of `evaluation`."""
        evaluation = preset.evaluation.model_copy(update=read)
        return cls.of(preset, training=shared_training(preset), evaluation=evaluation, **own)

    @property
    def train_length(self) -> int:
        """The training length L."""
        return int(self.training["model"]["train_length"])

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        """Lines of the plan."""
        longest = self.train_length * max(self.evaluation.multiples)
        return (("trained at, tested up to", f"{self.train_length}, {longest}"),)


class CausalCell(Cell):
    """A causal language model with the score `variant`, trained, and what `after` does with it."""

    training: dict[str, Any]
    evaluation: EvaluationSettings

    @property
    def workload(self) -> CausalWorkload:
        """A causal language model."""
        return CausalWorkload()

    @property
    def training_config(self) -> TrainingConfig:
        """The settings of this cell's training run."""
        varied = {"seed": self.seed, "model.score": self.variant}
        return TrainingConfig.parse(merged(self.training, varied), f"the settings of {self.name}")

    def stages(self, paths: CellPaths) -> list[Stage]:
        """The training run, then `after`."""
        trained = TrainStage(self.workload, self.training_config, paths.run)
        return [trained, *self.after(paths)]

    @abstractmethod
    def after(self, paths: CellPaths) -> list[Stage]:
        """What is done once the run is trained."""


class ReadCell(CausalCell):
    """A trained run, read in the ways that `methods` name."""

    kind: Literal["read"] = "read"
    methods: tuple[str, ...]

    @property
    def readings(self) -> int:
        """A row for every way of reading."""
        return len(self.methods)

    def after(self, paths: CellPaths) -> list[Stage]:
        """Read the run."""
        return [ReadStage(self.training_config, paths.run, self.methods, self.evaluation)]


def read_sweep(
    request: Request,
    study: str,
    preset: Preset,
    config: TextConfig,
    methods: Mapping[str, tuple[str, ...]],
    skipped: Sequence[Omission] = (),
) -> Sweep:
    """A training of each score and seed, read in the ways that `methods` name for the score."""
    read = {variant: {"methods": own} for variant, own in methods.items()}
    cells = cells_of(ReadCell, config, seeds_of(request, preset), read)
    return text_sweep(request, study, config, cells, evaluation_sets, skipped)


def text_sweep(
    request: Request,
    study: str,
    config: TextConfig,
    cells: Sequence[CausalCell],
    sets: Callable[[TokenData, int, EvaluationSettings], Sequence[AnySet]],
    skipped: Sequence[Omission] = (),
) -> Sweep:
    """The sweep of these cells; `sets` makes the texts that each reads, of the training length and
    the settings of evaluation.
    """
    describe = described(lambda data: sets(data, config.train_length, config.evaluation))
    return sweep_of(request, study, config, cells, describe, config.facts, skipped)


def usable(
    methods: Mapping[str, Sequence[str]], config: TextConfig
) -> tuple[dict[str, tuple[str, ...]], list[Omission]]:
    """Of each score the methods that can be applied to it, and why each of the others cannot."""
    applicable, skipped = {}, list[Omission]()
    for variant, asked in methods.items():
        applicable[variant], omissions = usable_methods(variant, asked, config)
        skipped += [omission for omission in omissions if omission not in skipped]
    return applicable, skipped


def described(
    windows: Callable[[TokenData], Sequence[AnySet]],
) -> Callable[[Cell, TokenData], list[str]]:
    """What a study says of its corpus; `windows` are the held-out texts that every cell reads."""

    def describe(cell: Cell, data: TokenData) -> list[str]:
        config = cell.training_config
        assert isinstance(config, TrainingConfig)
        documents = {name for evaluation_set in windows(data) for name in evaluation_set.documents}
        said = [
            f"corpus {config.data.corpus}: {data.train.total:,} training tokens in "
            f"{len(data.train):,} documents; {len(documents):,} held-out documents are scored"
        ]
        passes = cell.workload.cost(config).trained / max(1, data.train.total)
        if passes > 1:
            said.append(f"each run sees the training text about {passes:.1f} times")
        return said

    return describe


def opened(
    request: Request,
    study: str,
    kind: type[OwnPreset],
    instead: Mapping[str, str] | None = None,
) -> OwnPreset:
    """The preset with the request's changes; `kind` holds what this study reads of it.

    `instead` are settings of `evaluation` that it does not read, and what decides in their place.
    Raises `InputError` for a change of a setting that this study does not read.
    """
    preset = presets.load_as(kind, request.preset)
    unread = {"name", *STUDY_GROUPS} - (kind.model_fields.keys() - {"name"})
    for name in request.changes:
        top = name.partition(".")[0]
        if top in unread:
            raise InputError(f"--set {name}: reproduce {study} reads no {top} settings")
        own = (instead or {}).get(name.removeprefix("evaluation."))
        if top == "evaluation" and own:
            raise InputError(f"--set {name}: reproduce {study} reads {own} instead")
    return validated(kind, merged(preset.model_dump(), request.changes), f"preset {preset.name}")


def shared_training(preset: Preset) -> dict[str, Any]:
    """The preset's training settings with every default filled in, less what the table varies."""
    source = f"preset {preset.name}, training"
    varied = {"seed": 0, "model.score": "Baseline"}
    whole = TrainingConfig.parse(merged(preset.training, varied), source)
    fields = whole.model_dump(mode="json")
    del fields["seed"], fields["model"]["score"]
    return fields


def canonical(variants: Sequence[str], config: TextConfig) -> tuple[str, ...]:
    """The scores to train, by their printed names; each must be whole and trainable here."""
    names = []
    for variant in variants:
        spec = ScoreSpec.parse(variant)
        if spec.method:
            raise InputError(
                f"{variant} holds {spec.method}, which is applied after training; "
                f"name {spec.variant_name} among --variants and {spec.method} among --methods"
            )
        names.append(spec.text)
    if len(set(names)) != len(names):
        raise InputError(f"--variants names a score twice: {', '.join(variants)}")
    for name in names:
        check_trainable(name, config)
    return tuple(names)


def check_trainable(variant: str, config: TextConfig) -> None:
    """Raise `InputError` when a model of these settings cannot be trained with the score."""
    (cell,) = cells_of(ReadCell, config, (0,), {variant: {"methods": ()}})
    _ = cell.training_config


def checked_methods(methods: Sequence[str], config: TextConfig) -> tuple[str, ...]:
    """The methods by their printed names; an unknown one is refused with the nearest named."""
    plain = ScoreSpec.parse("Baseline")
    names = []
    for method in methods:
        if method.lower() in ("", "as is", "as-is"):
            names.append(AS_IS)
            continue
        spec = plain.with_method(method)
        if spec.train_length not in (None, config.train_length):
            raise InputError(
                f"{method} is for a training length of {spec.train_length}, but this table's is "
                f"{config.train_length}"
            )
        applied = spec.method_text
        if not applied:
            raise InputError(f"{method} changes nothing after training; it is no --methods entry")
        names.append(applied)
    return tuple(dict.fromkeys(names))


def usable_methods(
    variant: str, methods: Sequence[str], config: TextConfig
) -> tuple[tuple[str, ...], list[Omission]]:
    """The methods that can be applied to a score, and why each of the others cannot."""
    spec = ScoreSpec.parse(variant, train_length=config.train_length)
    refused = {
        method: refusal(spec, "" if method == AS_IS else method, config.evaluation.factor)
        for method in methods
    }
    omissions = [Omission(variant, method, why) for method, why in refused.items() if why]
    return tuple(method for method, why in refused.items() if why is None), omissions

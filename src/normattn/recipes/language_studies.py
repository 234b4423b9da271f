"""What the studies of causal language models share: their settings, cells and scores."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

from normattn.data import TokenData
from normattn.errors import InputError
from normattn.evaluation import AnySet
from normattn.recipes import presets
from normattn.recipes.layout import CellPaths
from normattn.recipes.merging import merged
from normattn.recipes.omissions import Omission
from normattn.recipes.reading_stages import AS_IS, ReadStage
from normattn.recipes.settings import EvaluationSettings, Preset, validated
from normattn.recipes.stages import Stage, TrainStage
from normattn.recipes.studies import Cell, Request, SweepConfig
from normattn.score import ScoreSpec
from normattn.training import TrainingConfig
from normattn.training.causal import CausalWorkload


class TextConfig(SweepConfig):
    """What every cell of a study of language models shares.

    `training` is a whole `TrainingConfig` without the score and the seed.
    """

    training: dict[str, Any]
    evaluation: EvaluationSettings

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
        name = f"{self.variant}/seed{self.seed}"
        config = self.training_config
        return [ReadStage(config, paths.run, self.methods, self.evaluation, name)]


def described(
    windows: Callable[[TokenData], Sequence[AnySet]],
) -> Callable[[Cell, TokenData], list[str]]:
    """What a study says of its corpus; `windows` are the held-out texts that every cell reads."""

    def describe(cell: Cell, data: TokenData) -> list[str]:
        config = cell.training_config
        assert isinstance(config, TrainingConfig)
        documents = {name for each in windows(data) for name in each.documents}
        said = [
            f"corpus {config.data.corpus}: {data.train.total:,} training tokens in "
            f"{len(data.train):,} documents; {len(documents):,} held-out documents are scored"
        ]
        passes = cell.workload.cost(config).trained / max(1, data.train.total)
        if passes > 1:
            said.append(f"each run sees the training text about {passes:.1f} times")
        return said

    return describe


def opened(request: Request, study: str, group: str | None = None) -> Preset:
    """The preset with the request's changes; `group` is what this study alone reads of it.

    Raises `InputError` for a change of a setting that this study does not read.
    """
    preset = presets.load(request.preset)
    read = {"training", "evaluation", "seeds", "summary", group}
    for name in request.changes:
        top = name.partition(".")[0]
        if top in Preset.model_fields and top not in read:
            raise InputError(f"--set {name}: reproduce {study} reads no {top} settings")
    return validated(Preset, merged(preset.model_dump(), request.changes), f"preset {preset.name}")


def shared_training(preset: Preset) -> dict[str, Any]:
    """The preset's training settings with every default filled in, less what the table varies."""
    what = f"preset {preset.name}, training"
    varied = {"seed": 0, "model.score": "Baseline"}
    whole = TrainingConfig.parse(merged(preset.training, varied), what)
    fields = whole.model_dump(mode="json")
    del fields["seed"], fields["model"]["score"]
    return fields


def canonical(variants: Sequence[str], config: TextConfig) -> tuple[str, ...]:
    """The scores to train, by their printed names; each must be whole and trainable here."""
    found = []
    for variant in variants:
        spec = ScoreSpec.parse(variant)
        if spec.method:
            raise InputError(
                f"{variant} holds {spec.method}, which is applied after training; "
                f"name {spec.variant_name} among --variants and {spec.method} among --methods"
            )
        found.append(str(spec).partition("@")[0])
    if len(set(found)) != len(found):
        raise InputError(f"--variants names a score twice: {', '.join(variants)}")
    for name in found:
        check_trainable(name, config)
    return tuple(found)


def check_trainable(variant: str, config: TextConfig) -> None:
    """Raise `InputError` when a model of these settings cannot be trained with the score."""
    _ = ReadCell(
        variant=variant,
        seed=0,
        methods=(),
        training=config.training,
        evaluation=config.evaluation,
    ).training_config


def checked_methods(methods: Sequence[str], config: TextConfig) -> tuple[str, ...]:
    """The methods by their printed names; an unknown one is refused with the nearest named."""
    plain = ScoreSpec.parse("Baseline")
    found = []
    for method in methods:
        if method.lower() in ("", "as is", "as-is"):
            found.append(AS_IS)
            continue
        text, _, length = str(plain.with_method(method)).partition("@")
        if length and int(length) != config.train_length:
            raise InputError(
                f"{method} is for a training length of {length}, but this table's is "
                f"{config.train_length}"
            )
        applied = text.removeprefix("Baseline").removeprefix("-")
        if not applied:
            raise InputError(f"{method} changes nothing after training; it is no --methods entry")
        found.append(applied)
    return tuple(dict.fromkeys(found))


def usable_methods(
    variant: str, methods: Sequence[str], config: TextConfig
) -> tuple[tuple[str, ...], list[Omission]]:
    """The methods that can be applied to a score, and why each of the others cannot."""
    usable, omissions = [], []
    spec = ScoreSpec.parse(variant, train_length=config.train_length)
    for method in methods:
        try:
            spec.with_method("" if method == AS_IS else method).resolve(
                train_length=config.train_length, factor=config.evaluation.factor
            )
        except InputError as error:
            omissions.append(Omission(variant, method, str(error)))
        else:
            usable.append(method)
    return tuple(usable), omissions

"""What every study shares: a request, the settings it resolves to, its cells and its report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from normattn.data import TokenData
from normattn.errors import InputError
from normattn.evaluation import AnySet
from normattn.recipes import presets
from normattn.recipes.layout import CellPaths
from normattn.recipes.merging import merged
from normattn.recipes.omissions import Omission
from normattn.recipes.settings import EvaluationSettings, Preset, Settings, validated
from normattn.recipes.stages import AS_IS, ReadStage, Stage, TrainStage
from normattn.score import ScoreSpec
from normattn.training import TrainingConfig

# Settings that no digit of a table depends on.
CHANGEABLE = (
    "training.checkpoint_seconds",
    "training.tensorboard",
    "evaluation.max_tokens",
    "mechanism.max_tokens",
)


class SweepConfig(Settings):
    """What every cell of one study shares; cells may be added, but this may not change.

    `training` is a whole `TrainingConfig` without the score and the seed.
    """

    preset: str
    training: dict[str, Any]
    evaluation: EvaluationSettings

    @property
    def train_length(self) -> int:
        """The training length L."""
        return int(self.training["model"]["train_length"])


class Cell(Settings, ABC):
    """One child process's work: `variant` trained with `seed`, and what is done with the model."""

    kind: str
    variant: str
    seed: int
    training: dict[str, Any]
    evaluation: EvaluationSettings

    @property
    def training_config(self) -> TrainingConfig:
        """The settings of this cell's training run."""
        varied = {"seed": self.seed, "model.score": self.variant}
        return TrainingConfig.parse(merged(self.training, varied), f"the settings of {self.name}")

    @property
    def name(self) -> str:
        """How progress and errors call this cell."""
        return f"{self.variant} seed {self.seed}"

    @property
    def readings(self) -> int:
        """How many rows of the table the cell gives."""
        return 1

    def stages(self, paths: CellPaths) -> list[Stage]:
        """What the cell does, in order: the training run, then `after`."""
        return [TrainStage(self.training_config, paths.run), *self.after(paths)]

    @abstractmethod
    def after(self, paths: CellPaths) -> list[Stage]:
        """What is done once the run is trained."""


class ReadCell(Cell):
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


@dataclass(frozen=True)
class Request:
    """What the command line asks for; None leaves a choice to the preset.

    `changes` are settings by dotted name, as `{"training.steps": 100}`.
    """

    preset: str = "laptop"
    variants: tuple[str, ...] | None = None
    methods: tuple[str, ...] | None = None
    seeds: tuple[int, ...] | None = None
    jobs: int | None = None
    out: Path | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sweep:
    """A resolved request: the shared settings, the cells to run, and the rows left out and why.

    `study` is the name of the command, `report` writes the tables and figures of a directory, and
    `windows` are the held-out texts that every cell reads.
    """

    study: str
    config: SweepConfig
    cells: tuple[Cell, ...]
    skipped: tuple[Omission, ...]
    out: Path
    report: Callable[[Path], None]
    windows: Callable[[TokenData], Sequence[AnySet]]

    def documents(self, data: TokenData) -> set[str]:
        """The held-out documents that are read; `InputError` where none is long enough."""
        return {name for each in self.windows(data) for name in each.documents}

    def stages(self, cell: Cell) -> list[Stage]:
        """The stages of one of the cells, in this sweep's directory."""
        return cell.stages(CellPaths.of(self.out, cell.variant, cell.seed))


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


def refuse_choices(
    request: Request, study: str, *, variants: bool = True, methods: bool = False
) -> None:
    """Raise `InputError` for --variants or --methods where a study has its own."""
    for option, given, allowed in (
        ("--variants", request.variants, variants),
        ("--methods", request.methods, methods),
    ):
        if given is not None and not allowed:
            raise InputError(f"reproduce {study} chooses its own {option[2:]}; leave {option} out")


def shared_training(preset: Preset) -> dict[str, Any]:
    """The preset's training settings with every default filled in, less what the table varies."""
    what = f"preset {preset.name}, training"
    varied = {"seed": 0, "model.score": "Baseline"}
    whole = TrainingConfig.parse(merged(preset.training, varied), what)
    fields = whole.model_dump(mode="json")
    del fields["seed"], fields["model"]["score"]
    return fields


def seeds_of(request: Request, preset: Preset) -> tuple[int, ...]:
    """The seeds asked for, or the preset's."""
    return request.seeds or tuple(range(preset.seeds))


def place_of(request: Request, study: str, preset: Preset) -> Path:
    """Where the study goes: what was asked for, or runs/STUDY-PRESET."""
    return request.out or Path("runs") / f"{study}-{preset.name}"


def canonical(variants: Sequence[str], config: SweepConfig) -> tuple[str, ...]:
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


def check_trainable(variant: str, config: SweepConfig) -> None:
    """Raise `InputError` when a model of these settings cannot be trained with the score."""
    _ = ReadCell(
        variant=variant,
        seed=0,
        methods=(),
        training=config.training,
        evaluation=config.evaluation,
    ).training_config


def checked_methods(methods: Sequence[str], config: SweepConfig) -> tuple[str, ...]:
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
    variant: str, methods: Sequence[str], config: SweepConfig
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

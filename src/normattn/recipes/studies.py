"""What every study shares: a request, the settings it resolves to, its cells and its report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from normattn.errors import InputError
from normattn.recipes import presets
from normattn.recipes.layout import CellPaths
from normattn.recipes.merging import merged
from normattn.recipes.omissions import Omission
from normattn.recipes.settings import Settings, StudyPreset, validated
from normattn.recipes.stages import Stage
from normattn.training import LoopConfig
from normattn.training.workload import Workload

# Settings that no digit of a table depends on.
CHANGEABLE = (
    "training.checkpoint_seconds",
    "training.tensorboard",
    "evaluation.max_tokens",
    "mechanism.max_tokens",
)
OwnPreset = TypeVar("OwnPreset", bound=StudyPreset)


class SweepConfig(Settings):
    """What every cell of one study shares; cells may be added, but this may not change."""

    preset: str


class Cell(Settings, ABC):
    """One child process's work: `variant` trained with `seed`, and what is done with the model.

    A study's cells differ in (variant, seed), which also name their directories.
    """

    kind: str
    variant: str
    seed: int

    @property
    @abstractmethod
    def workload(self) -> Workload[Any, Any]:
        """What kind of training this is."""

    @property
    @abstractmethod
    def training_config(self) -> LoopConfig:
        """The settings of this cell's training run."""

    @abstractmethod
    def stages(self, paths: CellPaths) -> list[Stage]:
        """What the cell does, in order."""

    @property
    def name(self) -> str:
        """How progress and errors call this cell."""
        return f"{self.variant} seed {self.seed}"

    @property
    def readings(self) -> int:
        """How many rows of the table the cell gives."""
        return 1

    def prepare(self) -> Any:
        """The data of its stages, from the cache where there is one."""
        return self.workload.prepare(self.training_config)


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

    `study` is the name of the command and `report` writes the tables and figures of a directory.
    `facts` are further lines of the plan; `describe` is told a cell's data, once for each kind of
    cell, and says in lines what it is (`InputError` where it does not suffice).
    """

    study: str
    config: SweepConfig
    cells: tuple[Cell, ...]
    skipped: tuple[Omission, ...]
    out: Path
    report: Callable[[Path], None]
    describe: Callable[[Cell, Any], Sequence[str]]
    facts: tuple[tuple[str, str], ...] = ()

    def stages(self, cell: Cell) -> list[Stage]:
        """The stages of one of the cells, in this sweep's directory."""
        return cell.stages(CellPaths.of(self.out, cell.variant, cell.seed))


def opened_as(request: Request, study: str, kind: type[OwnPreset]) -> OwnPreset:
    """The study's own preset of that name with the request's changes, checked as a `kind`."""
    name, fields = presets.fields(request.preset, study)
    changed = merged({"name": name, **fields}, request.changes)
    return validated(kind, changed, f"preset {name} of {study}")


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


def seeds_of(request: Request, preset: StudyPreset) -> tuple[int, ...]:
    """The seeds asked for, or the preset's."""
    return request.seeds or tuple(range(preset.seeds))


def place_of(request: Request, study: str, preset: StudyPreset) -> Path:
    """Where the study goes: what was asked for, or runs/STUDY-PRESET."""
    return request.out or Path("runs") / f"{study}-{preset.name}"

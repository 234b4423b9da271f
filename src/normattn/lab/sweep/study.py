"""A study as a value; and what all share: a request, its settings, its cells, its measurements."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import polars as pl
from pydantic import Field

from normattn.errors import InputError
from normattn.lab.report.page import Page, Written, context, write_page
from normattn.lab.stats import Identity, collected, identified, sums
from normattn.lab.stats.measurements import Factor
from normattn.lab.sweep import presets
from normattn.lab.sweep.corpora import canonical_json
from normattn.lab.sweep.launchers import Launcher, Local
from normattn.lab.sweep.layout import CellPaths
from normattn.lab.sweep.methods import Omission
from normattn.lab.sweep.settings import StudyPreset, merged, validated
from normattn.lab.sweep.stages import Stage
from normattn.lab.training import LoopConfig
from normattn.lab.training.tasks.workload import Workload
from normattn.settings import Settings, typed

CORPUS = "training.data.corpus"

# Settings that no digit of a table depends on.
CHANGEABLE = (
    "training.checkpoint_seconds",
    "training.track",
    "training.tensorboard",  # what `track` was before
    "training.parallel",
    "evaluation.max_tokens",
    "mechanism.max_tokens",
    "changed",  # what follows from it is compared
    "asked",  # it chooses cells, which may be added
)
# Settings of rows that may be added: where one is empty, no cell was made of it yet.
ADDABLE = ("english",)
OwnPreset = TypeVar("OwnPreset", bound=StudyPreset)
OwnCell = TypeVar("OwnCell", bound="Cell")
OwnConfig = TypeVar("OwnConfig", bound="SweepConfig")


class SweepConfig(Settings):
    """What every cell of one study shares; cells may be added, but this may not change."""

    preset: str
    changed: dict[str, Any] = Field(default_factory=dict)
    """What was asked for beside the preset, by dotted name."""
    asked: tuple[dict[str, str], ...] = ()
    """The options that chose the cells, of every command that added some: see `Request.choices`."""

    @classmethod
    def of(cls: type[OwnConfig], preset: StudyPreset, **own: Any) -> OwnConfig:
        """What a preset says of it, and what it does not (`own`)."""
        taken = {name: getattr(preset, name) for name in cls.model_fields if hasattr(preset, name)}
        return cls(**{**taken, "preset": preset.name, **own})


def free_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> frozenset[str]:
    """What may differ between the settings of two sweeps whose cells shall be one study's."""
    added = (name for name in ADDABLE if not (one.get(name) and other.get(name)))
    return frozenset({*CHANGEABLE, *added})


def with_added(config: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with those settings of `later` that only rows added later have."""
    added = {name: later[name] for name in ADDABLE if later.get(name) and not config.get(name)}
    if not added:
        return dict(config)
    changed = {**config.get("changed", {}), **later.get("changed", {})}
    return {**config, **added, "changed": changed}


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
    def reads(self) -> tuple[str, str]:
        """Cells that agree in this read the same data: the kind, and the settings of the data."""
        data = self.training_config.model_dump(mode="json").get("data")
        return self.kind, canonical_json(data)

    @property
    def readings(self) -> int:
        """How many rows of the table the cell gives."""
        return 1

    def identity(self, protocol: str, **factors: Factor) -> Identity:
        """Whose measurement it is: the row and the seed, and what else the study varies."""
        return Identity(
            study="",
            row=self.variant,
            score=self.variant,
            seed=self.seed,
            protocol=protocol,
            factors=factors,
        )

    def prepare(self) -> Any:
        """The data of its stages, from the cache where there is one."""
        return self.workload.prepare(self.training_config)


@dataclass(frozen=True)
class Request:
    """What the command line asks for; None leaves a choice to the preset.

    `changes` are settings by dotted name, as `{"training.steps": 100}`; `launcher` is where the
    cells run, which no digit depends on.
    """

    preset: str = "laptop"
    variants: tuple[str, ...] | None = None
    methods: tuple[str, ...] | None = None
    seeds: tuple[int, ...] | None = None
    jobs: int | None = None
    out: Path | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    launcher: Launcher = field(default_factory=Local)

    @property
    def choices(self) -> dict[str, str]:
        """The options that choose cells and how they are read, as they are typed."""
        seeds, count = self.seeds, len(self.seeds or ())
        # One number is how many there are, from 0 on; with a comma it is the seed itself.
        counted = str(count) if seeds == tuple(range(count)) else ",".join(map(str, seeds or ()))
        given = {
            "variants": self.variants and ",".join(self.variants),
            "methods": self.methods and ",".join(self.methods),
            "seeds": seeds and (f"{counted}," if count == 1 and seeds != (0,) else counted),
        }
        return {name: text for name, text in given.items() if text}


@dataclass(frozen=True)
class Sweep:
    """A resolved request: the shared settings, the cells to run, and the rows left out and why.

    `study` is the study's name. `facts` are further lines of the plan; `describe` is told a cell's
    data, once for each kind of cell, and says in lines what it is (`InputError` where it does not
    suffice).
    """

    study: str
    config: SweepConfig
    cells: tuple[Cell, ...]
    skipped: tuple[Omission, ...]
    out: Path
    describe: Callable[[Cell, Any], Sequence[str]]
    facts: tuple[tuple[str, str], ...] = ()

    def stages(self, cell: Cell) -> list[Stage]:
        """The stages of one of the cells, in this sweep's directory."""
        return cell.stages(CellPaths.of(self.out, cell.variant, cell.seed))


@dataclass(frozen=True)
class Study:
    """One experiment: its question, what it trains and measures, and the page that it becomes.

    `resolve` makes a sweep of a request, `cells` are the kinds of its cells. `help` is what
    `reproduce NAME --help` says; `variants` and `methods` explain these options, "" where the study
    has no such choice. `headline` are the columns of the page's first table that `reproduce` says
    of each cell when it ends. `examples` are command lines (after `normattn reproduce NAME`) and
    what they do. `source` is the file of a study that is not part of the library. `made_by` is the
    command line that measures where `reproduce` does not.
    """

    name: str
    help: str
    resolve: Callable[[Request], Sweep]
    cells: tuple[type[Cell], ...]
    page: Page
    variants: str = ""
    methods: str = ""
    headline: tuple[str, ...] = ()
    examples: tuple[tuple[str, str], ...] = ()
    collect: Callable[[Path], pl.DataFrame] = collected
    source: Path | None = None
    made_by: str = ""

    def cell(self, fields: Mapping[str, Any], where: str) -> Cell:
        """The cell that these fields describe; `InputError` for one of another study."""
        for kind in self.cells:
            if fields.get("kind") == kind.model_fields["kind"].default:
                return validated(kind, dict(fields), where)
        raise InputError(f"{where} describes no cell of the study {self.name}")

    def measurements(self, out: Path) -> pl.DataFrame:
        """Everything that was measured below `out`, under this study's name."""
        return self.collect(out).with_columns(pl.lit(self.name).alias("study"))

    def command(self, config: Mapping[str, Any]) -> str:
        """The command line that makes the study of these settings from nothing.

        Several where cells were added by further ones; "" where no settings are known, as of runs
        that were gathered.
        """
        if self.made_by or not config:
            return self.made_by
        # Of one's own, without its folder: a page is the same wherever it is made.
        name = f"./{self.source.name}" if self.source else self.name
        preset = presets.typed(str(config.get("preset", "laptop")), self.name)
        words = ["normattn", "reproduce", name, "--preset", preset]
        # A group and one of its members may both have been given: the later one counts.
        last: dict[str, tuple[str, str]] = {}
        for setting, value in config.get("changed", {}).items():
            if setting == CORPUS:
                last[CORPUS] = ("--corpus", str(value))
            else:
                last |= {line.partition("=")[0]: ("--set", line) for line in typed(setting, value)}
        words += [word for pair in last.values() for word in pair]
        asked: Sequence[Mapping[str, str]] = config.get("asked") or [{}]
        return " && ".join(
            shlex.join([*words, *(word for name in given for word in (f"--{name}", given[name]))])
            for given in asked
        )

    def report(self, measured: pl.DataFrame, out: Path, config: Mapping[str, Any]) -> Written:
        """Write the report of these measurements into `out`.

        `config` are the sweep's settings, as config.json holds them.
        """
        made = context(
            self.page,
            measured,
            settings=flat({k: v for k, v in config.items() if k not in ("changed", "asked")}),
            command=self.command(config),
        )
        return write_page(made, measured, out)


def measured_by(command: str) -> Callable[[Request], Sweep]:
    """What resolves a study that trains nothing: an `InputError` that names its command."""

    def resolve(request: Request) -> Sweep:
        raise InputError(f"{command} measures this; reproduce is for studies that train")

    return resolve


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Settings as text by dotted name; None and empty groups are left out."""
    texts: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            texts |= flat(value, f"{prefix}{name}.")
        elif value not in (None, [], ()):
            shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            texts[prefix + name] = shown
    return texts


def diverged(cell: Cell, step: int, where: str, **factors: Factor) -> pl.DataFrame:
    """The measurement that says: this training ended in NaN, first seen in the module `where`."""
    return identified(
        cell.identity("training", **factors),
        [sums("diverged", [where], [[1.0]], [[1.0]], axis="step", edges=[float(step)])],
    )


def opened_as(request: Request, study: str, kind: type[OwnPreset]) -> OwnPreset:
    """The study's own preset of that name with the request's changes, checked as a `kind`."""
    name, fields = presets.fields(request.preset, study)
    changed = merged({"name": name, **fields}, request.changes)
    return validated(kind, changed, f"preset {name} of {study}")


def cells_of(
    kind: type[OwnCell],
    config: SweepConfig,
    seeds: Sequence[int],
    variants: Mapping[str, Mapping[str, Any]],
) -> tuple[OwnCell, ...]:
    """Each of `variants` with each seed: its own fields, and all that `config` shares with them."""
    known = kind.model_fields.keys() & type(config).model_fields.keys()
    shared = {name: getattr(config, name) for name in known}
    return tuple(
        kind(**{**shared, "variant": variant, "seed": seed, **own})
        for seed in seeds
        for variant, own in variants.items()
    )


def sweep_of(
    request: Request,
    study: str,
    config: SweepConfig,
    cells: Sequence[Cell],
    describe: Callable[[Cell, Any], Sequence[str]],
    facts: tuple[tuple[str, str], ...] = (),
    skipped: Sequence[Omission] = (),
) -> Sweep:
    """The sweep of these cells, where the request or the preset wants it."""
    out = request.out or Path("runs") / f"{study}-{config.preset}"
    return Sweep(study, config, tuple(cells), tuple(skipped), out, describe, facts)


def refuse_choices(request: Request, study: str, *, variants: bool = True) -> None:
    """Raise `InputError` for --methods, and for --variants where a study has its own."""
    own = {"variants": None if variants else request.variants, "methods": request.methods}
    for name, given in own.items():
        if given is not None:
            raise InputError(f"reproduce {study} chooses its own {name}; leave --{name} out")


def seeds_of(request: Request, preset: StudyPreset) -> tuple[int, ...]:
    """The seeds asked for, or the preset's."""
    return request.seeds or tuple(range(preset.seeds))

"""Does a KeyNorm model need nothing changed when training continues at a longer length?

Each score is trained at L and then continues at 4 L: KNA (and CosA, KNA-logn) unchanged; Baseline
unchanged and with the usual remedies, PI, ABF, NTK and YaRN. Every model is read at L, 4 L and
16 L, before and along the way (kexue.fm/archives/9859).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import polars as pl
from pydantic import Field, field_validator, model_validator

from normattn.errors import InputError
from normattn.lab.data import TokenData
from normattn.lab.data.windows import EvaluationSet, non_repeated_set, train_length_set
from normattn.lab.report.claim import Claim
from normattn.lab.report.figure import Curves, Figure, Line, Panel
from normattn.lab.report.points import points
from normattn.lab.report.table import Column, Row, Table, text_column
from normattn.lab.report.view import View
from normattn.lab.studies.base import (
    ACCURACY,
    LOSS,
    VARIANT_ORDER,
    Run,
    Study,
    label,
    pairs_of,
    ranked,
)
from normattn.lab.sweep.language import (
    TextConfig,
    check_trainable,
    opened,
    shared_training,
    text_sweep,
)
from normattn.lab.sweep.layout import CellPaths
from normattn.lab.sweep.reading import KeptStage
from normattn.lab.sweep.settings import EvaluationSettings, Preset, merged
from normattn.lab.sweep.stages import UNKNOWN, Stage, TrainStage
from normattn.lab.sweep.study import Request, Sweep, cells_of, refuse_choices, seeds_of
from normattn.lab.training import TrainingConfig
from normattn.score import ScoreSpec
from normattn.settings import Settings

KIND = "continue"
VARIANTS = ("Baseline", "KNA", "KNA-logn", "CosA")
REMEDIES = ("PI", "ABF", "NTK", "YaRN")
UNCHANGED = "as it is"
STEP = "factor.step"
MATTERS = 0.05
"""Nats: an undecided claim whose interval could have shown none but larger differences has too
little data."""
INSTEAD = {"multiples": "continued.read", "protocols": "the protocols of its question"}


class ContinueSettings(Settings):
    """`reproduce continue` and `retrofit`: how training goes on at `multiple` training lengths.

    `batch_size` None takes as many tokens a step as before. The learning rate rises to `lr` over
    `warmup_steps` and follows the schedule of the preset to the last of `steps`. The models of the
    steps in `keep` are read at the lengths in `read`, in units of L.
    """

    multiple: int = Field(default=4, ge=2)
    steps: int = Field(default=200, ge=1)
    batch_size: int | None = Field(default=None, ge=1)
    warmup_steps: int = Field(default=20, ge=0)
    lr: float = Field(default=1e-3, gt=0)
    keep: tuple[int, ...] = (25, 50, 100, 200)
    read: tuple[int, ...] = (1, 4, 16)

    @field_validator("read")
    @classmethod
    def _rising(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value or list(value) != sorted(set(value)) or value[0] != 1:
            raise ValueError(f"read must rise from 1 (what is forgotten), got {list(value)}")
        return value

    @model_validator(mode="after")
    def _ends_at_the_last_step(self) -> ContinueSettings:
        if not self.keep or self.keep[-1] != self.steps:
            raise ValueError(
                f"keep must end with the last step {self.steps}, got {list(self.keep)}"
            )
        return self


class ContinuePreset(Preset):
    """A preset with the way in which training goes on."""

    continued: ContinueSettings = ContinueSettings()


class ContinueConfig(TextConfig):
    """What the study's runs share: also how training goes on."""

    continued: ContinueSettings


class ContinuedRun(Run, ABC):
    """A score trained at L, and branches of further training that are read along the way."""

    continued: ContinueSettings

    @property
    @abstractmethod
    def branches(self) -> Mapping[str, Mapping[str, Any]]:
        """Each branch by its name: settings of its training beside those that all share."""

    @property
    @abstractmethod
    def sets(self) -> Callable[[TokenData, int, EvaluationSettings], Sequence[EvaluationSet]]:
        """The held-out texts that every model is read on."""

    def lengths(self, length: int) -> tuple[int, ...]:
        """The lengths of these texts."""
        return tuple(length * multiple for multiple in self.evaluation.multiples)

    @property
    def readings(self) -> int:
        """A row for every branch."""
        return len(self.branches)

    def after(self, paths: CellPaths) -> list[Stage]:
        """Train each branch, and read what it kept."""
        return [
            stage
            for name, changes in self.branches.items()
            for stage in self._branch(name, changes, paths)
        ]

    def _branch(self, name: str, changes: Mapping[str, Any], paths: CellPaths) -> Iterator[Stage]:
        settings, folder = self.continued, paths.continued / name
        shared: dict[str, Any] = {
            "steps": settings.steps,
            "keep": settings.keep,
            "optimiser.lr": settings.lr,
            "schedule.warmup_steps": settings.warmup_steps,
            "continued": {"start": str(paths.run / "model"), "weights": UNKNOWN},
        }
        fields = merged(self.training_config.model_dump(mode="json"), shared, changes)
        config = TrainingConfig.parse(fields, f"the settings of {self.name}")
        length = config.model.train_length
        yield TrainStage(self.workload, config, folder, essential=False)
        yield KeptStage(
            config=config,
            folder=folder,
            sets=lambda data: self.sets(data, length, self.evaluation),
            lengths=self.lengths(length),
            settings=self.evaluation,
            factors={"continued": name},
        )


class ContinueCell(ContinuedRun):
    """One score trained at L, which goes on at a longer length under each of `methods`."""

    kind: Literal["continue"] = "continue"
    methods: tuple[str, ...]

    @property
    def readings(self) -> int:
        """A row for every method."""
        return len(self.methods)

    @property
    def branches(self) -> Mapping[str, Mapping[str, Any]]:
        """One for each method."""
        longer = self.training_config.model.train_length * self.continued.multiple
        batch = {"batch_size": self.continued.batch_size, "continued.length": longer}
        return {
            method or UNCHANGED: {**batch, "continued.method": method} for method in self.methods
        }

    @property
    def sets(self) -> Callable[[TokenData, int, EvaluationSettings], list[EvaluationSet]]:
        """Natural text of each length."""
        return evaluation_sets


def evaluation_sets(
    data: TokenData, train_length: int, settings: EvaluationSettings
) -> list[EvaluationSet]:
    """Natural text of each of the lengths, every token scored."""
    split, windows, seed = data.split(settings.split), settings.max_windows, settings.seed
    sets = [train_length_set(split, train_length, max_windows=windows, seed=seed)]
    for multiple in settings.multiples[1:]:
        sets.append(non_repeated_set(split, train_length, multiple, max_windows=windows, seed=seed))
    return sets


def resolve(request: Request) -> Sweep:
    """The study that a request asks for; raises `InputError` as `keynorm.resolve` does."""
    preset = opened(request, KIND, ContinuePreset, INSTEAD)
    refuse_choices(request, KIND, variants=False)
    continued = _with_batch_size(preset.continued, shared_training(preset)["batch_size"])
    read = {"multiples": continued.read, "protocols": ("train_length", "non_repeated")}
    config = ContinueConfig.of_text(preset, read, continued=continued)
    for variant in VARIANTS:
        check_trainable(variant, config)
    ways = {v: _methods(v, config.train_length, continued.multiple) for v in VARIANTS}
    methods = {variant: {"methods": way} for variant, way in ways.items()}
    cells = cells_of(ContinueCell, config, seeds_of(request, preset), methods)
    return checked(text_sweep(request, KIND, config, cells, evaluation_sets))


def checked(sweep: Sweep) -> Sweep:
    """The sweep; settings that cannot be are refused now, not after the first training."""
    for stage in sweep.stages(sweep.cells[0]):
        _ = stage.cost
    return sweep


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


def _methods(variant: str, length: int, multiple: int) -> tuple[str, ...]:
    """Unchanged; the score without a norm also under each remedy."""
    if variant != "Baseline":
        return ("",)
    plain = ScoreSpec.parse(variant, train_length=length)
    stretched = (plain.with_method(name).resolve(factor=multiple) for name in REMEDIES)
    return ("", *(spec.method_text for spec in stretched))


def _read(view: View) -> pl.DataFrame:
    return view.frame.filter(pl.col("protocol") != "training")


def _lengths(view: View) -> list[int]:
    return sorted(_read(view)["length"].unique().to_list())


def rows(view: View) -> list[Row]:
    """Every branch at every step that was kept."""
    return [
        Row(label(row, method), {"row": row, "method": method, STEP: step})
        for row, method in sorted(pairs_of(_read(view)), key=_by_method)
        for step in sorted(_read(view).filter(row=row, method=method)[STEP].unique().to_list())
    ]


def _by_method(branch: tuple[str, str]) -> tuple[int, str]:
    """Scores in the order of tables, methods by their names."""
    order = ranked([branch[0], *VARIANT_ORDER], VARIANT_ORDER)
    return order.index(branch[0]), branch[1]


def last_rows(view: View) -> list[Row]:
    """Every branch after its last step."""
    return list({row.label: row for row in rows(view)}.values())


STEPS = text_column("step", "continued steps", lambda view, row: row.where[STEP])


def columns(view: View) -> list[Column]:
    """Loss and accuracy at every length."""
    return [
        STEPS,
        *(
            Column(f"{metric.name}_{n}", f"{metric.name} at {n:,}", metric.at(length=n))
            for metric in (LOSS, ACCURACY)
            for n in _lengths(view)
        ),
    ]


def changes(view: View) -> list[Column]:
    """The last step less step 0 of the same trained model without any method."""
    return [
        STEPS,
        *(
            Column(f"change_{n}", f"at {n:,}", LOSS.at(length=n) - LOSS.at(_BEFORE, length=n))
            for n in _lengths(view)
        ),
    ]


_BEFORE = {"method": "", STEP: 0}


def claims(view: View) -> list[Claim]:
    """The scores with a norm, unchanged, against Baseline and its remedies after the last step."""
    last = last_rows(view)
    return [
        Claim(
            f"{normed.where['row']}, unchanged, ends with a lower loss than {base.label}",
            LOSS.at(normed.where, length=length) - LOSS.at(base.where, length=length),
            *("kexue 9859", f"loss at {length:,}, nats", -1, MATTERS),
        )
        for base in last
        if base.where["row"].startswith("Baseline")
        for normed in last
        if not normed.where["row"].startswith("Baseline")
        for length in _lengths(view)[1:]
    ]


def figures(view: View) -> list[Figure]:
    """Loss and accuracy by continued steps, a panel for every length."""
    panels = []
    for metric, unit in ((LOSS, "loss (nats per token)"), (ACCURACY, "accuracy (%)")):
        for length in _lengths(view):
            lines = []
            for last in last_rows(view):
                steps = [row.where for row in rows(view) if row.label == last.label]
                places = ((where[STEP], {**where, "length": length}) for where in steps)
                plotted = points(view, metric, places)
                lines.append(Line(last.label, plotted, last.label, bool(last.where["method"])))
            title = f"{metric.title}, read at {length:,}"
            panels.append(Panel(title, tuple(lines), "continued steps", unit))
    title = "Training that continues at a longer length: with and without a change"
    return [Curves("continued", title, tuple(panels), shared_y=False)]


STUDY = Study(
    KIND,
    "Trained at L, then continued at a longer length: does a model with normalised keys "
    "need any change, and does it end as well as Baseline with a stretched rotation?",
    title="Training that continues at a longer length",
    help="Train at L, continue at 4 L: KeyNorm as it is, Baseline as it is and with PI, ABF, NTK, "
    "YaRN.\n\nEach model is read at L (what is forgotten), 4 L and 16 L before and along the "
    "continued training; tables and a figure of loss and accuracy by continued steps. The settings "
    "of the continued training are said once, in the preset, for all scores.",
    sources=("kexue.fm/archives/9859",),
    resolve=resolve,
    runs=(ContinueCell,),
    tables=(
        Table(
            "table",
            "",
            rows,
            columns,
            intro="Natural held-out text, every token scored. The method that a row names is "
            "switched on from then on (step 0: before the first step).",
        ),
        Table(
            "changes",
            "What was forgotten and gained",
            last_rows,
            changes,
            intro="Change of the loss (nats) from the model as it was trained to the last step, "
            "paired; above 0 at the shortest length: forgotten.",
        ),
    ),
    claims=claims,
    figures=figures,
    examples=(
        ("--preset smoke", "the whole path, small"),
        ("", "the study itself; `--plan` says how long it takes here"),
        ("--seeds 3", "with intervals over three trained models of each kind"),
        ("--set continued.multiple=8 --plan", "at 8 training lengths: its cost"),
    ),
)

"""Does a KeyNorm model need nothing changed when training continues at a longer length?

Each score is trained at L and then continues at 4 L: KNA (and CosA, KNA-logn) as it is; Baseline as
it is and with the usual remedies, PI, ABF, NTK and YaRN. Every model is read at L, 4 L and 16 L,
before and along the way (kexue.fm/archives/9859).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import polars as pl
from pydantic import Field, field_validator, model_validator

from normattn.errors import InputError
from normattn.lab.data import TokenData
from normattn.lab.data.windows import EvaluationSet, non_repeated_set, train_length_set
from normattn.lab.report.claim import Claim, difference
from normattn.lab.report.figure import Curves, Figure, Line, Panel
from normattn.lab.report.page import Page
from normattn.lab.report.points import points
from normattn.lab.report.table import Cell, Column, Row, Table
from normattn.lab.report.view import View
from normattn.lab.studies._reading import ACCURACY, LOSS, VARIANT_ORDER, label, ranked
from normattn.lab.sweep.collect import measured_below
from normattn.lab.sweep.language import (
    CausalCell,
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
from normattn.lab.sweep.study import Request, Study, Sweep, cells_of, refuse_choices, seeds_of
from normattn.lab.training import TrainingConfig
from normattn.score import ScoreSpec
from normattn.settings import Settings

KIND = "continue"
VARIANTS = ("Baseline", "KNA", "KNA-logn", "CosA")
REMEDIES = ("PI", "ABF", "NTK", "YaRN")
UNCHANGED = "as it is"
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
        folder = paths.continued / (method or UNCHANGED)
        length, settings = config.model.train_length, self.evaluation
        yield TrainStage(self.workload, config, folder, essential=False)
        yield KeptStage(
            config=config,
            folder=folder,
            sets=lambda data: evaluation_sets(data, length, settings),
            lengths=tuple(length * multiple for multiple in settings.multiples),
            settings=settings,
            factors={"continued": method or UNCHANGED},
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
    preset = opened(request, KIND, ContinuePreset, INSTEAD)
    refuse_choices(request, KIND, variants=False)
    continued = _with_batch_size(preset.continued, shared_training(preset)["batch_size"])
    read = {"multiples": continued.read, "protocols": ("train_length", "non_repeated")}
    config = ContinueConfig.of_text(preset, read, continued=continued)
    for variant in VARIANTS:
        check_trainable(variant, config)
    length = int(config.training["model"]["train_length"])
    ways = {variant: _methods(variant, length, continued.multiple) for variant in VARIANTS}
    methods = {variant: {"methods": way} for variant, way in ways.items()}
    cells = cells_of(ContinueCell, config, seeds_of(request, preset), methods)
    sweep = text_sweep(request, KIND, config, cells, evaluation_sets)
    for stage in sweep.stages(cells[0]):
        _ = stage.cost  # Settings that cannot be are refused now, not after the first training.
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


def evaluation_sets(
    data: TokenData, train_length: int, settings: EvaluationSettings
) -> list[EvaluationSet]:
    """Natural text of each of the lengths, every token scored."""
    split, windows, seed = data.split(settings.split), settings.max_windows, settings.seed
    sets = [train_length_set(split, train_length, max_windows=windows, seed=seed)]
    for multiple in settings.multiples[1:]:
        sets.append(non_repeated_set(split, train_length, multiple, max_windows=windows, seed=seed))
    return sets


STEP = "factor.step"


def _read(view: View) -> pl.DataFrame:
    return view.frame.filter(pl.col("protocol") != "training")


def _branches(view: View) -> list[tuple[str, str]]:
    """Every (row, method) that training continued with."""
    pairs = set(_read(view).select("row", "method").unique().rows())
    return [
        (row, method)
        for row in ranked({row for row, _ in pairs}, VARIANT_ORDER)
        for method in sorted(method for name, method in pairs if name == row)
    ]


def _lengths(view: View) -> list[int]:
    return sorted(_read(view)["length"].unique().to_list())


def _steps(view: View, row: str, method: str) -> list[int]:
    frame = _read(view).filter(pl.col("row") == row, pl.col("method") == method)
    return sorted(frame[STEP].unique().to_list())


def rows(view: View) -> list[Row]:
    """Every branch at every step that was kept."""
    return [
        Row(label(row, method), {"row": row, "method": method, STEP: step})
        for row, method in _branches(view)
        for step in _steps(view, row, method)
    ]


def columns(view: View) -> Sequence[Column]:
    """Loss and accuracy at every length."""
    all_columns = [
        Column("step", "continued steps", plain=lambda view, row: Cell(str(row.where[STEP])))
    ]
    for key, statistic in (("loss", LOSS), ("accuracy", ACCURACY)):
        for length in _lengths(view):
            at = ((1.0, {"length": length}),)
            all_columns.append(Column(f"{key}_{length}", f"{key} at {length:,}", statistic, at))
    return all_columns


def _last_rows(view: View) -> list[Row]:
    return [
        Row(label(row, method), {"row": row, "method": method, STEP: _steps(view, row, method)[-1]})
        for row, method in _branches(view)
    ]


def _change_columns(view: View) -> Sequence[Column]:
    """The last step less step 0 of the same trained model without any method."""
    changes = [columns(view)[0]]
    for length in _lengths(view):
        at = {"length": length}
        terms = ((1.0, at), (-1.0, {**at, "method": "", STEP: 0}))
        changes.append(Column(f"change_{length}", f"at {length:,}", LOSS, terms, signed=True))
    return changes


def claims(view: View) -> list[Claim]:
    """The scores with a norm, unchanged, against Baseline and its remedies after the last step."""
    last = _last_rows(view)
    return [
        difference(
            f"{normed.where['row']}, unchanged, ends with a lower loss than {base.label}",
            "kexue 9859",
            f"loss at {length:,}, nats",
            LOSS,
            *({**row.where, "length": length} for row in (normed, base)),
            sign=-1,
            matters=MATTERS,
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
    for statistic, unit in ((LOSS, "loss (nats per token)"), (ACCURACY, "accuracy (%)")):
        for length in _lengths(view):
            lines = []
            for row, method in _branches(view):
                where = {"row": row, "method": method, "length": length}
                steps = ((n, {**where, STEP: n}) for n in _steps(view, row, method))
                plotted = points(view, statistic, steps)
                lines.append(Line(label(row, method), plotted, label(row, method), bool(method)))
            title = f"{statistic.title}, read at {length:,}"
            panels.append(Panel(title, tuple(lines), "continued steps", unit))
    title = "Training that continues at a longer length: with and without a change"
    return [Curves("continued", title, tuple(panels), shared_y=False)]


PAGE = Page(
    title="Training that continues at a longer length",
    question="Trained at L, then continued at a longer length: does a model with normalised keys "
    "need any change, and does it end as well as Baseline with a stretched rotation?",
    sources=("kexue.fm/archives/9859",),
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
            _last_rows,
            _change_columns,
            intro="Change of the loss (nats) from the model as it was trained to the last step, "
            "paired; above 0 at the shortest length: forgotten.",
        ),
    ),
    claims=claims,
    figures=figures,
)

STUDY = Study(
    name=KIND,
    help="Train at L, continue at 4 L: KeyNorm as it is, Baseline as it is and with PI, ABF, NTK, "
    "YaRN.\n\nEach model is read at L (what is forgotten), 4 L and 16 L before and along the "
    "continued training; tables and a figure of loss and accuracy by continued steps. The settings "
    "of the continued training are said once, in the preset, for all scores.",
    resolve=resolve,
    cells=(ContinueCell,),
    page=PAGE,
    examples=(
        ("--preset smoke", "the whole path, small"),
        ("", "the study itself; `--plan` says how long it takes here"),
        ("--seeds 3", "with intervals over three trained models of each kind"),
        ("--set continued.multiple=8 --plan", "at 8 training lengths: its cost"),
    ),
    collect=measured_below,
)

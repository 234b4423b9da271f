"""Training that goes on: at a longer length (*continue*), or with another score (*retrofit*).

*continue* (kexue.fm/archives/9859): each score is trained at L and goes on at 4 L: KNA, KNA-logn
and CosA unchanged; Baseline unchanged and with the usual remedies, PI, ABF, NTK and YaRN. Every
model is read at L, 4 L and 16 L, before and along the way. *retrofit*: Baseline is trained at L,
its score is exchanged, and training goes on at L: as KNA, as QKRMSNorm, and as Baseline itself, the
control that gets the same steps; each branch is read at L (what it costs) and after 8 L.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import polars as pl
from pydantic import Field, field_validator, model_validator

from normattn.errors import InputError
from normattn.lab.data import TokenData
from normattn.lab.data.windows import EvaluationSet, non_repeated_set, train_length_set
from normattn.lab.report.claims import Claim
from normattn.lab.report.figures import Curves, Figure, Line, Panel
from normattn.lab.report.tables import Column, Row, Table, text_column
from normattn.lab.report.view import View, points
from normattn.lab.studies.base import Study
from normattn.lab.studies.language import (
    Sets,
    TextSetting,
    continued_config,
    evaluation_sets,
    kept_stage,
    set_lengths,
)
from normattn.lab.studies.lm_report import (
    ACCURACY,
    CHANGE,
    LAST,
    LOSS,
    VARIANT_ORDER,
    label,
    pairs_of,
    ranked,
)
from normattn.lab.studies.methods import canonical
from normattn.lab.studies.preset import EvaluationSettings, opened, own_group
from normattn.lab.sweep.paths import RunPaths
from normattn.lab.sweep.run import Request, Run, Stage, Sweep, training_stage
from normattn.lab.training.tasks.text import CausalWorkload
from normattn.score import ScoreSpec
from normattn.settings import Settings

NORMED = ("KNA", "KNA-logn", "CosA")
REMEDIES = ("PI", "ABF", "NTK", "YaRN")
UNCHANGED = "as it is"
STEP, BRANCH = "factor.step", "factor.continued"
MATTERS = 0.05
"""Nats: an undecided claim whose interval could have shown none but larger differences has too
little data."""


class ContinueSettings(Settings):
    """`reproduce continue` and `retrofit`: how training goes on.

    The learning rate rises to `lr` over `warmup_steps` and follows the schedule of the preset to
    the last of `steps`. The models of the steps in `keep` are read. Of *continue* alone: training
    is at `multiple` training lengths, `batch_size` None takes as many tokens a step as before, and
    models are read at the lengths in `read`, in units of L.
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

    @property
    def training(self) -> dict[str, Any]:
        """What every training that goes on has."""
        return {
            "steps": self.steps,
            "keep": self.keep,
            "optimiser.lr": self.lr,
            "schedule.warmup_steps": self.warmup_steps,
        }


class ContinuedRun(Run):
    """A score trained at L, and branches of further training that are read along the way.

    `branches` are their settings by name, laid over those of `continued`. With `every_length` they
    are read on natural text of each length, else by the protocols of `evaluation`.
    """

    workload: ClassVar[CausalWorkload] = CausalWorkload()
    kind: Literal["continued"] = "continued"
    evaluation: EvaluationSettings
    continued: ContinueSettings
    branches: dict[str, dict[str, Any]]
    every_length: bool

    @property
    def readings(self) -> int:
        """A row for every branch."""
        return len(self.branches)

    def stages(self, paths: RunPaths) -> list[Stage]:
        """Train, then train each branch and read what it kept."""
        stages = [training_stage(self.workload, self.training_config, paths.run)]
        lengths = self.evaluation.multiples if self.every_length else set_lengths(self.evaluation)
        for name, changes in self.branches.items():
            config = continued_config(self, paths, {**self.continued.training, **changes})
            folder, factors = paths.continued / name, {"continued": name}
            stages += [
                training_stage(self.workload, config, folder, essential=False),
                kept_stage(config, folder, self.sets, lengths, self.evaluation, factors),
            ]
        return stages

    @property
    def sets(self) -> Sets:
        """What makes the texts that the branches are read on."""
        return natural_sets if self.every_length else evaluation_sets


def natural_sets(
    data: TokenData, train_length: int, settings: EvaluationSettings
) -> list[EvaluationSet]:
    """Natural text of each of the lengths, every token scored."""
    split, windows, seed = data.split(settings.split), settings.max_windows, settings.seed
    sets = [train_length_set(split, train_length, max_windows=windows, seed=seed)]
    for multiple in settings.multiples[1:]:
        sets.append(non_repeated_set(split, train_length, multiple, max_windows=windows, seed=seed))
    return sets


def _sweep(
    request: Request,
    study: str,
    setting: TextSetting,
    continued: ContinueSettings,
    branches: Mapping[str, dict[str, dict[str, Any]]],
    *,
    every_length: bool,
) -> Sweep:
    """A run of each score and seed with the score's `branches`.

    Branches that cannot be are refused now, not after a training.
    """
    runs = [
        ContinuedRun(
            variant=variant,
            seed=seed,
            training=setting.trains(variant),
            evaluation=setting.evaluation,
            continued=continued,
            branches=own,
            every_length=every_length,
        )
        for seed in request.seeds_or(setting.preset.seeds)
        for variant, own in branches.items()
    ]
    sweep = setting.sweep(request, study, runs, sets=runs[0].sets, continued=continued)
    for stage in sweep.stages(sweep.runs[0]):
        stage.cost()
    return sweep


# At a longer length


def resolve(request: Request) -> Sweep:
    """The study that a request asks for; raises `InputError` as `keynorm.resolve` does."""
    instead = {"multiples": "continued.read", "protocols": "the protocols of its question"}
    preset = opened(request, "continue", "continued", instead)
    request.refuse_choices("continue", variants=False)
    continued = own_group(request, "continued", ContinueSettings)
    read = {"multiples": continued.read, "protocols": ("train_length", "non_repeated")}
    setting = TextSetting.of(preset, read)
    before, multiple = setting.training["batch_size"], continued.multiple
    if continued.batch_size is None and before % multiple:
        raise InputError(
            f"a batch of {before} sequences holds no whole number of sequences "
            f"{multiple} times as long; give continued.batch_size"
        )
    batch = continued.batch_size or before // multiple
    continued = continued.model_copy(update={"batch_size": batch})
    longer = {"batch_size": batch, "continued.length": setting.train_length * multiple}
    plain = ScoreSpec.parse("Baseline", train_length=setting.train_length)
    remedies = [plain.with_method(name).resolve(factor=multiple).method_text for name in REMEDIES]
    branches = {
        variant: {
            method or UNCHANGED: {**longer, "continued.method": method}
            for method in ("", *(remedies if variant == "Baseline" else ()))
        }
        for variant in canonical(("Baseline", *NORMED), setting)
    }
    return _sweep(request, "continue", setting, continued, branches, every_length=True)


def _read(view: View) -> pl.DataFrame:
    return view.frame.filter(pl.col("protocol") != "training")


def _lengths(view: View) -> list[int]:
    return sorted(_read(view)["length"].unique().to_list())


def rows(view: View) -> list[Row]:
    """Every branch at every step that was kept: scores in the order of tables, then methods."""
    names = ranked({*VARIANT_ORDER, *view.values("row")}, VARIANT_ORDER)
    branches = sorted(pairs_of(_read(view)), key=lambda pair: (names.index(pair[0]), pair[1]))
    return [
        Row(label(row, method), {"row": row, "method": method, STEP: step})
        for row, method in branches
        for step in sorted(_read(view).filter(row=row, method=method)[STEP].unique().to_list())
    ]


def last_rows(view: View) -> list[Row]:
    """Every branch after its last step."""
    return list({row.label: row for row in rows(view)}.values())


STEPS = text_column("step", "continued steps", lambda view, row: row.where[STEP])


def _columns(view: View) -> list[Column]:
    """Loss and accuracy at every length."""
    return [
        STEPS,
        *(
            Column(f"{metric.name}_{n}", f"{metric.name} at {n:,}", metric.at(length=n))
            for metric in (LOSS, ACCURACY)
            for n in _lengths(view)
        ),
    ]


def _changes(view: View) -> list[Column]:
    """The last step less step 0 of the same trained model without any method."""
    before = {"method": "", STEP: 0}
    losses = {n: LOSS.at(length=n) for n in _lengths(view)}
    return [
        STEPS,
        *(Column(f"change_{n}", f"at {n:,}", loss - loss.at(before)) for n, loss in losses.items()),
    ]


def _claims(view: View) -> list[Claim]:
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


def _figures(view: View) -> list[Figure]:
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
    "continue",
    "Trained at L, then continued at a longer length: does a model with normalised keys "
    "need any change, and does it end as well as Baseline with a stretched rotation?",
    title="Training that continues at a longer length",
    help="Train at L, continue at 4 L: KeyNorm unmodified, Baseline unmodified and with PI, ABF, "
    "NTK, YaRN.\n\nEach model is read at L (what is forgotten), 4 L and 16 L before and along the "
    "continued training; tables and a figure of loss and accuracy by continued steps. The settings "
    "of the continued training are in the preset, the same for all scores.",
    sources=("kexue.fm/archives/9859",),
    resolve=resolve,
    runs=(ContinuedRun,),
    tables=(
        Table(
            "table",
            "",
            rows,
            _columns,
            intro="Natural held-out text, every token scored. The method that a row names is "
            "switched on from then on (step 0: before the first step).",
        ),
        Table(
            "changes",
            "What was forgotten and gained",
            last_rows,
            _changes,
            intro="Change of the loss (nats) from the model as it was trained to the last step, "
            "paired; above 0 at the shortest length: forgotten.",
        ),
    ),
    claims=_claims,
    figures=_figures,
    examples=(
        ("--preset smoke", "the whole path, small"),
        ("", "the study itself; `--plan` says how long it takes here"),
        ("--seeds 3", "with intervals over three trained models of each kind"),
        ("--set continued.multiple=8 --plan", "at 8 training lengths: its cost"),
    ),
)

# With another score

BASE = "Baseline"
AT_L: dict[str, Any] = {"protocol": "train_length"}


def resolve_retrofit(request: Request) -> Sweep:
    """One Baseline for each seed, and its branches; `--variants` chooses the scores they become.

    Raises `InputError` for an unknown score and for one whose weights have no place for Baseline's.
    """
    request.refuse_choices("retrofit")
    instead = {
        "protocols": "the protocols of its question",
        "continued.multiple": "the training length",
        "continued.batch_size": "training.batch_size",
        "continued.read": "evaluation.multiples",
    }
    preset = opened(request, "retrofit", "continued", instead)
    continued = own_group(request, "continued", ContinueSettings)
    read = {"multiples": preset.evaluation.ends, "protocols": ("train_length", "last_segment")}
    setting = TextSetting.of(preset, read)
    scores = dict.fromkeys((BASE, *(request.variants or ("KNA", "QKRMSNorm"))))
    branches: dict[str, dict[str, Any]] = {
        score: {"model.score": score, "continued.trained": None if score == BASE else BASE}
        for score in scores
    }
    return _sweep(request, "retrofit", setting, continued, {BASE: branches}, every_length=False)


def branches_of(view: View) -> list[str]:
    """The scores that training continued with and that were read since, the control first."""
    return ranked(view.values(BRANCH, {"protocol": "last_segment"}), (BASE,))


def steps_of(view: View, branch: str) -> list[int]:
    """The steps whose models were read; 0 is Baseline as it was trained."""
    return sorted(view.values(STEP, {BRANCH: branch, **AT_L}))


def _branch_rows(view: View) -> list[Row]:
    """Every branch after every step that was kept."""
    return [
        Row(f"as {branch}", {BRANCH: branch, STEP: step})
        for branch in branches_of(view)
        for step in steps_of(view, branch)
    ]


def _branch_columns(view: View) -> Sequence[Column]:
    """How good a branch is at L, and what a longer context does to the last segment."""
    read = view.lengths("last_segment")
    ends = zip(("near", "far"), (read[0], read[-1]) if read else (), strict=False)
    return [
        text_column("step", "further steps", lambda view, row: row.where[STEP]),
        Column("at_l", "accuracy at L", ACCURACY.at(AT_L)),
        Column("loss", "loss at L", LOSS.at(AT_L)),
        *(Column(key, f"last segment after {n:,}", LAST.at(length=n)) for key, n in ends),
        Column("change", "change", CHANGE),
    ]


def _branch_claims(view: View) -> list[Claim]:
    """After the last step each branch against the control."""
    every = branches_of(view)
    if BASE not in every:
        return []
    control = {BRANCH: BASE, STEP: steps_of(view, BASE)[-1]}
    claims, at_l = [], ACCURACY.at(AT_L)
    for branch in every[1:]:
        ours = {BRANCH: branch, STEP: steps_of(view, branch)[-1]}
        claims += [
            Claim(
                f"a Baseline that continues as {branch} loses less from L to the longest context",
                CHANGE.at(ours) - CHANGE.at(control),
                measured=f"change as {branch} − change as Baseline, last segment",
            ),
            Claim(
                f"it costs accuracy at L to continue as {branch}",
                at_l.at(ours) - at_l.at(control),
                measured=f"as {branch} − as Baseline at L, accuracy",
                sign=-1,
            ),
        ]
    return claims


def _branch_figures(view: View) -> list[Figure]:
    """Accuracy at L and of the last segment by further steps."""
    read = view.lengths("last_segment")
    places: dict[str, dict[str, Any]] = {"at L": AT_L}
    for n in (*read[:1], *read[-1:]):
        places[f"last segment after {n:,}"] = {"protocol": "last_segment", "length": n}

    def line(branch: str, where: dict[str, Any]) -> Line:
        at = ((n, {**where, BRANCH: branch, STEP: n}) for n in steps_of(view, branch))
        return Line(f"as {branch}", points(view, ACCURACY, at), branch)

    panels = tuple(
        Panel(
            title,
            tuple(line(branch, where) for branch in branches_of(view)),
            *("further steps", "accuracy (%)"),
        )
        for title, where in places.items()
    )
    return [Curves("retrofit", "A trained Baseline with another score from step 0", panels)]


RETROFIT_STUDY = Study(
    "retrofit",
    "A model was trained with Baseline. Does exchanging its score for one with normalised "
    "keys, and training on for some steps, let it read past L, and what does it cost?",
    title="Another score for a trained model",
    help="Train Baseline, exchange its score for KNA or QKRMSNorm, and train on at L.\n\n"
    "Each branch, and a Baseline that gets the same further steps, is read at L and after 8 L "
    "along the way. The preset has its settings, under `continued`.",
    sources=("kexue.fm/archives/9859", "arXiv 2010.04245"),
    resolve=resolve_retrofit,
    runs=(ContinuedRun,),
    tables=(
        Table(
            "table",
            "",
            _branch_rows,
            _branch_columns,
            head="continued",
            intro="Token accuracy in % (loss in nats). Step 0 is Baseline as it was trained; "
            "change: the last segment after the longest context minus after the shortest.",
        ),
    ),
    claims=_branch_claims,
    figures=_branch_figures,
    variants_help="Scores that Baseline becomes, by commas. [default: KNA,QKRMSNorm]",
    examples=(
        ("--preset smoke", "the whole path, small"),
        ("--seeds 3", "the study with verdicts"),
        ("--variants KNA,KNA-logn,CosA", "other scores"),
        ('--set continued.steps=800 --set "continued.keep=[200,800]"', "more further steps"),
    ),
)

"""Continued training: at a longer length (*continue*), or with another score (*retrofit*).

*continue* (kexue.fm/archives/9859): each score is trained at L, then at 4 L. KNA, KNA-logn and CosA
continue unchanged; Baseline unchanged and with PI, ABF, NTK and YaRN. Every model is evaluated at
L, 4 L and 16 L, before and during the continued training.

*retrofit*: Baseline is trained at L, then continues at L as KNA, as QKRMSNorm, or as Baseline, the
control with the same steps. Each branch is evaluated at L (what it costs) and after 8 L.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from normattn.errors import InputError
from normattn.lab.data.tokens import TokenData
from normattn.lab.data.windows import EvaluationSet, natural_set
from normattn.lab.report.figures import Curves, Figure, Line, Panel
from normattn.lab.report.tables import Column, Row, Table, text_column
from normattn.lab.report.view import View, points
from normattn.lab.stats import MeasurementStore, Metric
from normattn.lab.stats.arrays import Where
from normattn.lab.stats.measurements import Factor
from normattn.lab.studies import language
from normattn.lab.studies import lm_report as lm
from normattn.lab.studies.base import Claim, Study
from normattn.lab.studies.preset import EvaluationSettings, Preset, load_preset
from normattn.lab.sweep.config import merged
from normattn.lab.sweep.paths import RunPaths
from normattn.lab.sweep.run import EVALUATIONS, UNKNOWN, Request, Run, Stage, Sweep, training_stage
from normattn.lab.training import TrainingConfig
from normattn.lab.training.tasks.base import MODEL, kept_model
from normattn.models.pretrained import CONFIG_FILE
from normattn.score import ScoreSpec
from normattn.settings import Settings

NORMED = ("KNA", "KNA-logn", "CosA")
REMEDIES = ("PI", "ABF", "NTK", "YaRN")
BASE = "Baseline"
UNCHANGED = "as it is"
STEP, BRANCH = "factor.step", "factor.continued"
MATTERS = 0.05
"""The smallest difference that matters, in nats; see `Claim`."""

# What runs


class ContinueSettings(Settings):
    """Settings of the continued training, for `reproduce continue` and `reproduce retrofit`.

    The learning rate rises to `lr` over `warmup_steps`, then follows the preset's schedule to the
    last of `steps`. The models after the steps in `keep` and after the last one are evaluated.

    For *continue* only: training is at `multiple` training lengths, with as many tokens per step,
    and models are evaluated at the lengths in `read`, in units of L.
    """

    multiple: int = Field(default=4, ge=2)
    steps: int = Field(default=200, ge=1)
    warmup_steps: int = Field(default=20, ge=0)
    lr: float = Field(default=1e-3, gt=0)
    keep: tuple[int, ...] = (25, 50, 100, 200)
    read: tuple[int, ...] = (1, 4, 16)

    @model_validator(mode="after")
    def _check(self) -> ContinueSettings:
        read = self.read
        if not read or list(read) != sorted(set(read)) or read[0] != 1:
            raise ValueError(f"read must rise from 1 (what is forgotten), got {list(read)}")
        if self.keep and self.keep[-1] > self.steps:
            raise ValueError(f"keep must end by the last step {self.steps}, got {list(self.keep)}")
        return self


class ContinuedPreset(Preset):
    """A shared preset with the settings of these studies."""

    continued: ContinueSettings = ContinueSettings()


class ContinuedRun(Run):
    """A score trained at L, and branches of continued training, evaluated along the way.

    `branches` has each branch's settings, which override `continued`. With `every_length` branches
    are evaluated on held-out text of each length, else by the protocols of `evaluation`.
    """

    training_class: ClassVar[type[TrainingConfig]] = TrainingConfig
    kind: Literal["continued"] = "continued"
    evaluation: EvaluationSettings
    continued: ContinueSettings
    branches: dict[str, dict[str, Any]]
    every_length: bool

    def stages(self, paths: RunPaths) -> list[Stage]:
        """Train the score, then train and evaluate each branch."""
        continuation = {
            "continued": {"start": str(paths.run / MODEL), "weights": UNKNOWN},
            "steps": self.continued.steps,
            "keep": sorted({*self.continued.keep, self.continued.steps}),
            "optimiser.lr": self.continued.lr,
            "schedule.warmup_steps": self.continued.warmup_steps,
        }
        trained = self.training_config.model_dump(mode="json")
        stages = [training_stage(self.training_config, paths.run)]
        for name, changes in self.branches.items():
            fields = merged(trained, continuation, changes)
            config = TrainingConfig.parse(fields, f"the settings of {self.name}")
            folder = paths.continued / name
            stages.append(training_stage(config, folder, essential=False))
            stages.append(self.measurement_stage(folder, config))
        return stages

    @property
    def sets(self) -> language.Sets:
        """Makes the sets that the branches are evaluated on."""
        return held_out_sets if self.every_length else language.evaluation_sets

    def measurement_stage(self, folder: Path, config: TrainingConfig) -> Stage:
        """Evaluate the model that a branch started from (step 0), and the models that it kept.

        Each is evaluated with the branch's method, and its measurements have the factor `step`. A
        branch that diverged kept fewer models.
        """
        continued, settings, branch = config.continued, self.evaluation, folder.name
        assert continued is not None
        steps = (0, *config.keep)
        lengths = settings.multiples if self.every_length else language.set_lengths(settings)
        varied = {"continued": branch, "multiples": str(lengths)}
        marker = language.marker_key("kept", continued.method, settings, varied)

        def evaluations() -> list[language.ModelEvaluation]:
            tasks = []
            for step in steps:
                model = kept_model(folder, step) if step else Path(continued.start)
                if (model / CONFIG_FILE).is_file():
                    saved = config.model if step else continued.saved_config(config.model)
                    store = MeasurementStore(folder / EVALUATIONS / f"step-{step:08d}")
                    made = (model, saved, store, {continued.method: marker})
                    factors: dict[str, Factor] = {"step": step, "continued": branch}
                    tasks.append(language.ModelEvaluation(*made, factors))
            return tasks

        windows = settings.max_windows * len(steps)
        cost = partial(language.evaluation_cost, config, lengths, windows)
        return language.evaluation_stage(config, settings, self.sets, cost, evaluations)


def held_out_sets(
    data: TokenData, train_length: int, settings: EvaluationSettings
) -> list[EvaluationSet]:
    """Held-out text of each length, with every token scored."""
    split, sampling = data.split(settings.split), (settings.max_windows, settings.seed)
    return [
        natural_set("non_repeated" if n > 1 else "train_length", split, train_length, n, *sampling)
        for n in settings.multiples
    ]


def _sweep(
    request: Request,
    setting: language.TextSetting,
    continued: ContinueSettings,
    branches: Mapping[str, dict[str, dict[str, Any]]],
    *,
    study: str,
    every_length: bool,
) -> Sweep:
    """A run of each score with its branches; raises `InputError` for one that cannot be trained."""
    shared = {"continued": continued, "every_length": every_length}
    runs = [
        setting.run_of(ContinuedRun, score, branches=by_name, **shared)
        for score, by_name in branches.items()
    ]
    sweep = setting.sweep(request, study, runs, sets=runs[0].sets, continued=continued)
    for stage in sweep.stages(sweep.runs[0]):
        stage.cost()  # Raises where a branch cannot be trained.
    return sweep


STEPS = text_column("step", "continued steps", lambda view, row: row.where[STEP])


def _panel_by_step(view: View, title: str, metric: Metric, unit: str, rows: list[Row]) -> Panel:
    """A panel with the metric by continued step; a branch is the rows of one label."""
    lines = []
    for label, branch in groupby(rows, lambda row: row.label):
        wheres = [row.where for row in branch]
        plotted = points(view, ((where[STEP], metric.at(where)) for where in wheres))
        lines.append(Line(label, plotted, label, bool(wheres[0].get("method"))))
    return Panel(title, tuple(lines), "continued steps", unit)


# At a longer length


def resolve(request: Request) -> Sweep:
    """The sweep of *continue*; raises `InputError` as `keynorm.resolve` does."""
    unused = ("evaluation.multiples", "evaluation.protocols")
    preset = load_preset(request, "continue", ContinuedPreset, unused)
    continued = preset.continued
    overrides = {"multiples": continued.read, "protocols": ("train_length", "non_repeated")}
    setting = language.TextSetting.of(preset, overrides)
    batch, multiple = setting.training["batch_size"], continued.multiple
    if batch % multiple:
        raise InputError(
            f"a batch of {batch} sequences is not a whole number of sequences {multiple} times as "
            f"long; set training.batch_size to a multiple of {multiple}"
        )
    length = setting.train_length * multiple
    longer = {"batch_size": batch // multiple, "continued.length": length}
    base = ScoreSpec.parse(BASE, train_length=setting.train_length)
    remedies = [base.with_method(name).resolve(factor=multiple).method_text for name in REMEDIES]
    branches = {
        variant: {
            method or UNCHANGED: {**longer, "continued.method": method}
            for method in ("", *(remedies if variant == BASE else ()))
        }
        for variant in setting.canonical_scores((BASE, *NORMED))
    }
    return _sweep(request, setting, continued, branches, study="continue", every_length=True)


def _lengths(view: View) -> list[int]:
    return sorted(view.evaluated["length"].unique().to_list())


def _rows(view: View) -> list[Row]:
    """Every branch at every kept step: scores in the order of tables, then methods."""
    steps = view.evaluated.select("row", "method", STEP).unique().sort(STEP).rows()
    return [
        Row(row.label, {**row.where, STEP: step})
        for row in lm.rows_of(view.evaluated, methods=("",))
        for *branch, step in steps
        if branch == [*row.where.values()]
    ]


def _last_rows(view: View) -> list[Row]:
    """Every branch after its last step."""
    return list({row.label: row for row in _rows(view)}.values())


def _columns(view: View) -> list[Column]:
    columns = [
        Column(f"{metric.name}_{n}", f"{metric.name} at {n:,} tokens", metric.at(length=n))
        for metric in (lm.LOSS, lm.ACCURACY)
        for n in _lengths(view)
    ]
    return [STEPS, *columns]


def _changes(view: View) -> list[Column]:
    """The last step minus step 0 of the same trained model, unmodified."""
    start, columns = {"method": "", STEP: 0}, [STEPS]
    for n in _lengths(view):
        loss = lm.LOSS.at(length=n)
        columns.append(Column(f"change_{n}", f"at {n:,} tokens", loss - loss.at(start)))
    return columns


def _claims(view: View) -> Iterator[Claim]:
    """After the last step: scores with a norm, unchanged, against Baseline and its remedies."""
    last = _last_rows(view)
    bases = [row for row in last if row.where["row"].startswith(BASE)]
    normed = [row for row in last if row not in bases]
    for base, row, length in product(bases, normed, _lengths(view)[1:]):
        loss = lm.LOSS.at(length=length)
        yield Claim(
            f"{row.where['row']}, unchanged, ends with a lower loss than {base.label}",
            loss.at(row.where) - loss.at(base.where),
            *("kexue 9859", f"loss at {length:,}, nats", -1, MATTERS),
        )


def _figures(view: View) -> list[Figure]:
    rows = _rows(view)
    panels = [
        _panel_by_step(view, f"{metric.title} at {n:,} tokens", metric.at(length=n), unit, rows)
        for metric, unit in ((lm.LOSS, "loss (nats per token)"), (lm.ACCURACY, "accuracy (%)"))
        for n in _lengths(view)
    ]
    title = "Training that continues at a longer length: with and without a change"
    return [Curves("continued", title, tuple(panels), shared_y=False)]


STUDY = Study(
    "continue",
    "Trained at L, then continued at a longer length: does a model with normalised keys "
    "need any change, and does it end as well as Baseline with a stretched rotation?",
    title="Training that continues at a longer length",
    help="Train at L, continue at 4 L: KeyNorm unmodified, Baseline unmodified and with PI, ABF, "
    "NTK, YaRN.\n\nEach model is evaluated at L (what is forgotten), 4 L and 16 L, before and "
    "during the continued training. The preset has the settings of the continued training, which "
    "are the same for all scores.",
    sources=("kexue.fm/archives/9859",),
    resolve=resolve,
    runs=(ContinuedRun,),
    tables=(
        Table(
            "table",
            "",
            _rows,
            _columns,
            intro="Held-out text, every token scored. The method in a row's name is on from step "
            "0, before the first continued step.",
        ),
        Table(
            "changes",
            "What was forgotten and gained",
            _last_rows,
            _changes,
            intro="Change of the loss (nats) from the trained model to the last continued step, "
            "paired. Above 0 at the shortest length means forgotten.",
        ),
    ),
    claims=_claims,
    figures=_figures,
)

# With another score

AT_L: Where = {"protocol": "train_length"}


def resolve_retrofit(request: Request) -> Sweep:
    """The sweep of *retrofit*; `--variants` chooses the scores that Baseline continues as.

    Raises `InputError` for an unknown score and for one that cannot load Baseline's weights.
    """
    unused = ("evaluation.protocols", "continued.multiple", "continued.read")
    preset = load_preset(request, "retrofit", ContinuedPreset, unused)
    overrides = {"multiples": preset.evaluation.ends, "protocols": ("train_length", "last_segment")}
    branches: dict[str, dict[str, Any]] = {
        score: {"model.score": score, "continued.trained": None if score == BASE else BASE}
        for score in (BASE, *(request.variants or ("KNA", "QKRMSNorm")))
    }
    setting, continued = language.TextSetting.of(preset, overrides), preset.continued
    by_score = {BASE: branches}
    return _sweep(request, setting, continued, by_score, study="retrofit", every_length=False)


def _branch_rows(view: View) -> list[Row]:
    """Every branch at every kept step; step 0 is the trained Baseline."""
    branches = lm.ranked(view.values(BRANCH, {"protocol": "last_segment"}), (BASE,))
    return [
        Row(f"as {branch}", {BRANCH: branch, STEP: step})
        for branch in branches
        for step in sorted(view.values(STEP, {BRANCH: branch, **AT_L}))
    ]


def _branch_columns(view: View) -> list[Column]:
    lengths = view.lengths("last_segment")
    ends = {"near": lengths[0], "far": lengths[-1]} if lengths else {}
    return [
        STEPS,
        Column("at_l", "accuracy at the training length", lm.ACCURACY.at(AT_L)),
        Column("loss", "loss at the training length", lm.LOSS.at(AT_L)),
        *(
            Column(key, f"same final tokens after {n:,}", lm.LAST.at(length=n))
            for key, n in ends.items()
        ),
        Column("change", "change", lm.CHANGE),
    ]


def _branch_claims(view: View) -> Iterator[Claim]:
    """After the last step: each branch against the control."""
    last = {row.where[BRANCH]: row.where for row in _branch_rows(view)}
    control, at_l = last.pop(BASE, None), lm.ACCURACY.at(AT_L)
    for branch, where in last.items() if control else ():
        yield Claim(
            f"a Baseline that continues as {branch} loses less from the training length to the "
            "longest context",
            lm.CHANGE.at(where) - lm.CHANGE.at(control),
            measured=f"change as {branch} − change as Baseline, same final tokens",
        )
        yield Claim(
            f"it costs accuracy at the training length to continue as {branch}",
            at_l.at(where) - at_l.at(control),
            measured=f"as {branch} − as Baseline at the training length, accuracy",
            sign=-1,
        )


def _branch_figures(view: View) -> list[Figure]:
    lengths, rows = view.lengths("last_segment"), _branch_rows(view)
    metrics = {"at the training length": lm.ACCURACY.at(AT_L)}
    for n in (*lengths[:1], *lengths[-1:]):
        metrics[f"same final tokens after {n:,}"] = lm.LAST.at(length=n)
    panels = [
        _panel_by_step(view, title, metric, "accuracy (%)", rows)
        for title, metric in metrics.items()
    ]
    title = "A trained Baseline with another score from step 0"
    return [Curves("retrofit", title, tuple(panels))]


RETROFIT_STUDY = Study(
    "retrofit",
    "A model was trained with Baseline. Does exchanging its score for one with normalised "
    "keys, and some more training, let it handle text past L, and what does it cost?",
    title="Another score for a trained model",
    help="Train Baseline, replace its score by KNA or QKRMSNorm, and continue training at L.\n\n"
    "Each of them, and a Baseline with as many continued steps, is evaluated at L and 8 L along "
    "the way. The preset has the settings, under `continued`.",
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
            intro="Token accuracy in % (loss in nats). Step 0 is the trained Baseline. Change: "
            "accuracy on the same final tokens after the longest context minus the shortest.",
        ),
    ),
    claims=_branch_claims,
    figures=_branch_figures,
    variants_help="Scores that replace Baseline's, separated by commas. [default: KNA,QKRMSNorm]",
    examples=(
        ("--variants KNA,KNA-logn,CosA", "other scores"),
        ("--set continued.steps=800", "more continued steps"),
    ),
)

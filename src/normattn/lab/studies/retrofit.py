"""Can a trained Baseline become KNA by further training, and does it then extrapolate?

Baseline is trained at L. Then its score is exchanged, and training continues at L for some steps:
as KNA, as QKRMSNorm, and as Baseline itself, the control that gets the same steps. Every branch is
read along the way: at L (what it costs), and the same last L tokens after L and after 8 L.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import polars as pl

from normattn.errors import InputError
from normattn.lab.data import TokenData
from normattn.lab.data.windows import EvaluationSet, last_segment_sets, train_length_set
from normattn.lab.report.claim import Claim, difference
from normattn.lab.report.figure import Curves, Figure, Line, Panel
from normattn.lab.report.page import Page
from normattn.lab.report.points import points
from normattn.lab.report.table import Cell, Column, Row, Table
from normattn.lab.report.view import View
from normattn.lab.studies._reading import ACCURACY, LOSS, POINTS, change_terms, minus
from normattn.lab.studies.continue_ import ContinuePreset, ContinueSettings
from normattn.lab.sweep.collect import measured_below
from normattn.lab.sweep.language import CausalCell, TextConfig, opened, text_sweep
from normattn.lab.sweep.layout import CellPaths
from normattn.lab.sweep.reading import KeptStage
from normattn.lab.sweep.settings import EvaluationSettings, merged
from normattn.lab.sweep.stages import UNKNOWN, Stage, TrainStage
from normattn.lab.sweep.study import Request, Study, Sweep, cells_of, refuse_choices, seeds_of
from normattn.lab.training import TrainingConfig

NAME = "retrofit"
BASE = "Baseline"
SCORES = (BASE, "KNA", "QKRMSNorm")
BRANCH, STEP = "factor.continued", "factor.step"


class RetrofitConfig(TextConfig):
    """What the cells share: also how training continues."""

    continued: ContinueSettings


class RetrofitCell(CausalCell):
    """A Baseline, and a branch of further training for each of `scores`."""

    kind: Literal["retrofit"] = "retrofit"
    scores: tuple[str, ...]
    continued: ContinueSettings

    @property
    def readings(self) -> int:
        """A row for every branch."""
        return len(self.scores)

    def after(self, paths: CellPaths) -> list[Stage]:
        """Continue as each score, and read what each run kept."""
        return [stage for score in self.scores for stage in self._branch(score, paths)]

    def _branch(self, score: str, paths: CellPaths) -> Iterator[Stage]:
        config = self._continued_config(score, paths)
        folder, length = paths.continued / score, config.model.train_length
        yield TrainStage(self.workload, config, folder, essential=False)
        yield KeptStage(
            config=config,
            folder=folder,
            sets=lambda data: evaluation_sets(data, length, self.evaluation),
            lengths=(length, *(length * multiple for multiple in self.evaluation.multiples)),
            settings=self.evaluation,
            factors={"continued": score},
        )

    def _continued_config(self, score: str, paths: CellPaths) -> TrainingConfig:
        settings, trained = self.continued, None if score == self.variant else self.variant
        changes: dict[str, Any] = {
            "steps": settings.steps,
            "keep": settings.keep,
            "optimiser.lr": settings.lr,
            "schedule.warmup_steps": settings.warmup_steps,
            "model.score": score,
            "continued": {
                "start": str(paths.run / "model"),
                "weights": UNKNOWN,
                "trained": trained,
            },
        }
        fields = self.training_config.model_dump(mode="json")
        return TrainingConfig.parse(merged(fields, changes), f"the settings of {self.name}")


def resolve(request: Request) -> Sweep:
    """One Baseline for each seed, and its branches; `--variants` chooses the scores they become.

    Raises `InputError` for an unknown score and for one whose weights have no place for Baseline's.
    """
    refuse_choices(request, NAME)
    preset = opened(request, NAME, ContinuePreset, {"protocols": "the protocols of its question"})
    ends = preset.evaluation.multiples[:: max(1, len(preset.evaluation.multiples) - 1)]
    config = RetrofitConfig.of_text(preset, {"multiples": ends})
    scores = tuple(dict.fromkeys((BASE, *(request.variants or SCORES))))
    seeds = seeds_of(request, preset)
    cells = cells_of(RetrofitCell, config, seeds, {BASE: {"scores": scores}})
    sweep = text_sweep(request, NAME, config, cells, evaluation_sets)
    for stage in sweep.stages(cells[0]):
        _ = stage.cost  # Settings that cannot be are refused now, not after the first training.
    return sweep


def evaluation_sets(
    data: TokenData, train_length: int, settings: EvaluationSettings
) -> list[EvaluationSet]:
    """Natural text of the training length, and one last segment after L and after 8 L."""
    split, windows, seed = data.split(settings.split), settings.max_windows, settings.seed
    return [
        train_length_set(split, train_length, max_windows=windows, seed=seed),
        *last_segment_sets(split, train_length, settings.multiples, max_windows=windows, seed=seed),
    ]


def branches(view: View) -> list[str]:
    """The scores that training continued with and that were read since, the control first."""
    names = view.values(BRANCH, {"protocol": "last_segment"})
    return sorted(names, key=lambda name: (name != BASE, name))


def steps(view: View, branch: str) -> list[int]:
    """The steps whose models were read; 0 is Baseline as it was trained."""
    frame = view.frame.filter(pl.col(BRANCH) == branch, pl.col("protocol") != "training")
    return sorted(frame[STEP].unique().to_list())


def rows(view: View) -> list[Row]:
    """Every branch after every step that was kept."""
    return [
        Row(f"as {branch}", {BRANCH: branch, STEP: step})
        for branch in branches(view)
        for step in steps(view, branch)
    ]


def _lengths(view: View) -> tuple[int, int]:
    lengths = sorted(view.values("length", {"protocol": "last_segment"}))
    if not lengths:
        raise InputError("there is nothing to report yet: no trained model was read")
    return lengths[0], lengths[-1]


def columns(view: View) -> Sequence[Column]:
    """How good a branch is at L, and what a longer context does to the last segment."""
    near, far = ({"protocol": "last_segment", "length": n} for n in _lengths(view))
    at_l = {"protocol": "train_length"}
    return [
        Column("step", "further steps", plain=lambda view, row: Cell(str(row.where[STEP]))),
        Column("at_l", "accuracy at L", ACCURACY, ((1.0, at_l),)),
        Column("loss", "loss at L", LOSS, ((1.0, at_l),)),
        Column("near", f"last segment after {near['length']:,}", ACCURACY, ((1.0, near),)),
        Column("far", f"last segment after {far['length']:,}", ACCURACY, ((1.0, far),)),
        Column("change", "change", POINTS, ((1.0, far), (-1.0, near)), signed=True),
    ]


def claims(view: View) -> list[Claim]:
    """After the last step each branch against the control."""
    all_claims: list[Claim] = []
    if BASE not in branches(view):
        return all_claims
    for branch in branches(view)[1:]:
        ours = {BRANCH: branch, STEP: steps(view, branch)[-1]}
        control = {BRANCH: BASE, STEP: steps(view, BASE)[-1]}
        all_claims += [
            Claim(
                f"a Baseline that continues as {branch} loses less from L to the longest context",
                "asked here",
                f"change as {branch} − change as Baseline, last segment",
                POINTS,
                minus(*(change_terms(view, where) for where in (ours, control))),
            ),
            difference(
                f"it costs accuracy at L to continue as {branch}",
                "asked here",
                f"as {branch} − as Baseline at L, accuracy",
                POINTS,
                *({**where, "protocol": "train_length"} for where in (ours, control)),
                sign=-1,
            ),
        ]
    return all_claims


def figures(view: View) -> list[Figure]:
    """Accuracy at L and of the last segment by further steps."""
    near, far = _lengths(view)
    panels = []
    for title, where in (
        ("at L", {"protocol": "train_length"}),
        (f"last segment after {near:,}", {"protocol": "last_segment", "length": near}),
        (f"last segment after {far:,}", {"protocol": "last_segment", "length": far}),
    ):
        lines = []
        for branch in branches(view):
            at = ((n, {**where, BRANCH: branch, STEP: n}) for n in steps(view, branch))
            lines.append(Line(f"as {branch}", points(view, ACCURACY, at), branch))
        panels.append(Panel(title, tuple(lines), "further steps", "accuracy (%)"))
    return [Curves("retrofit", "A trained Baseline with another score from step 0", tuple(panels))]


PAGE = Page(
    title="Another score for a trained model",
    question="A model was trained with Baseline. Does exchanging its score for one with normalised "
    "keys, and training on for some steps, let it read past L, and what does it cost?",
    sources=("kexue.fm/archives/9859", "arXiv 2010.04245"),
    tables=(
        Table(
            "table",
            "",
            rows,
            columns,
            head="continued",
            intro="Token accuracy in % (loss in nats). Step 0 is Baseline as it was trained; "
            "change: the last segment after the longest context minus after the shortest.",
        ),
    ),
    claims=claims,
    figures=figures,
)

STUDY = Study(
    name=NAME,
    help="Train Baseline, exchange its score for KNA or QKRMSNorm, and train on at L.\n\n"
    "Each branch, and a Baseline that gets the same further steps, is read at L and after 8 L "
    "along the way. How training continues stands in the preset, under `continued`.",
    resolve=resolve,
    cells=(RetrofitCell,),
    page=PAGE,
    variants="Scores that Baseline becomes, by commas. [default: KNA,QKRMSNorm]",
    examples=(
        ("--preset smoke", "the whole path, small"),
        ("--seeds 3", "the study with verdicts"),
        ("--variants KNA,KNA-logn,CosA", "other scores"),
        ('--set continued.steps=800 --set "continued.keep=[200,800]"', "more further steps"),
    ),
    collect=measured_below,
)

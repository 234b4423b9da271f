"""Can a trained Baseline become KNA by further training, and does it then extrapolate?

Baseline is trained at L. Then its score is exchanged, and training continues at L for some steps:
as KNA, as QKRMSNorm, and as Baseline itself, the control that gets the same steps. Every branch is
read along the way: at L (what it costs), and the same last L tokens after L and after 8 L.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from normattn.lab.data import TokenData
from normattn.lab.data.windows import EvaluationSet, last_segment_sets, train_length_set
from normattn.lab.report.claim import Claim
from normattn.lab.report.figure import Curves, Figure, Line, Panel
from normattn.lab.report.points import points
from normattn.lab.report.table import Column, Row, Table, text_column
from normattn.lab.report.view import View
from normattn.lab.studies.base import ACCURACY, CHANGE, LAST, LOSS, Study, ranked
from normattn.lab.studies.continue_ import STEP, ContinueConfig, ContinuedRun, ContinuePreset
from normattn.lab.studies.continue_ import checked as checked_sweep
from normattn.lab.sweep.language import opened, text_sweep
from normattn.lab.sweep.settings import EvaluationSettings
from normattn.lab.sweep.study import Request, Sweep, cells_of, refuse_choices, seeds_of

NAME = "retrofit"
BASE = "Baseline"
SCORES = (BASE, "KNA", "QKRMSNorm")
BRANCH = "factor.continued"
AT_L: dict[str, Any] = {"protocol": "train_length"}


class RetrofitCell(ContinuedRun):
    """A Baseline, and a branch of further training for each of `scores`."""

    kind: Literal["retrofit"] = "retrofit"
    scores: tuple[str, ...]

    @property
    def branches(self) -> Mapping[str, Mapping[str, Any]]:
        """One for each score."""
        return {
            score: {
                "model.score": score,
                "continued.trained": None if score == self.variant else self.variant,
            }
            for score in self.scores
        }

    @property
    def sets(self) -> Callable[[TokenData, int, EvaluationSettings], list[EvaluationSet]]:
        """Natural text of length L, and last segments."""
        return evaluation_sets

    def lengths(self, length: int) -> tuple[int, ...]:
        """L, and each context of the last segment."""
        return (length, *super().lengths(length))


def evaluation_sets(
    data: TokenData, train_length: int, settings: EvaluationSettings
) -> list[EvaluationSet]:
    """Natural text of the training length, and one last segment after L and after 8 L."""
    split, windows, seed = data.split(settings.split), settings.max_windows, settings.seed
    return [
        train_length_set(split, train_length, max_windows=windows, seed=seed),
        *last_segment_sets(split, train_length, settings.multiples, max_windows=windows, seed=seed),
    ]


def resolve(request: Request) -> Sweep:
    """One Baseline for each seed, and its branches; `--variants` chooses the scores they become.

    Raises `InputError` for an unknown score and for one whose weights have no place for Baseline's.
    """
    refuse_choices(request, NAME)
    preset = opened(request, NAME, ContinuePreset, {"protocols": "the protocols of its question"})
    ends = preset.evaluation.multiples[:: max(1, len(preset.evaluation.multiples) - 1)]
    config = ContinueConfig.of_text(preset, {"multiples": ends}, continued=preset.continued)
    scores = tuple(dict.fromkeys((BASE, *(request.variants or SCORES))))
    cells = cells_of(RetrofitCell, config, seeds_of(request, preset), {BASE: {"scores": scores}})
    return checked_sweep(text_sweep(request, NAME, config, cells, evaluation_sets))


def branches(view: View) -> list[str]:
    """The scores that training continued with and that were read since, the control first."""
    return ranked(view.values(BRANCH, {"protocol": "last_segment"}), (BASE,))


def steps(view: View, branch: str) -> list[int]:
    """The steps whose models were read; 0 is Baseline as it was trained."""
    return sorted(view.values(STEP, {BRANCH: branch, **AT_L}))


def rows(view: View) -> list[Row]:
    """Every branch after every step that was kept."""
    return [
        Row(f"as {branch}", {BRANCH: branch, STEP: step})
        for branch in branches(view)
        for step in steps(view, branch)
    ]


def columns(view: View) -> Sequence[Column]:
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


def claims(view: View) -> list[Claim]:
    """After the last step each branch against the control."""
    every = branches(view)
    if BASE not in every:
        return []
    control = {BRANCH: BASE, STEP: steps(view, BASE)[-1]}
    claims = []
    for branch in every[1:]:
        ours = {BRANCH: branch, STEP: steps(view, branch)[-1]}
        at_l = ACCURACY.at(AT_L)
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


def figures(view: View) -> list[Figure]:
    """Accuracy at L and of the last segment by further steps."""
    read = view.lengths("last_segment")
    places: dict[str, dict[str, Any]] = {"at L": AT_L}
    for n in (*read[:1], *read[-1:]):
        places[f"last segment after {n:,}"] = {"protocol": "last_segment", "length": n}
    panels = []
    for title, where in places.items():
        lines = []
        for branch in branches(view):
            at = ((n, {**where, BRANCH: branch, STEP: n}) for n in steps(view, branch))
            lines.append(Line(f"as {branch}", points(view, ACCURACY, at), branch))
        panels.append(Panel(title, tuple(lines), "further steps", "accuracy (%)"))
    return [Curves("retrofit", "A trained Baseline with another score from step 0", tuple(panels))]


STUDY = Study(
    NAME,
    "A model was trained with Baseline. Does exchanging its score for one with normalised "
    "keys, and training on for some steps, let it read past L, and what does it cost?",
    title="Another score for a trained model",
    help="Train Baseline, exchange its score for KNA or QKRMSNorm, and train on at L.\n\n"
    "Each branch, and a Baseline that gets the same further steps, is read at L and after 8 L "
    "along the way. How training continues stands in the preset, under `continued`.",
    sources=("kexue.fm/archives/9859", "arXiv 2010.04245"),
    resolve=resolve,
    runs=(RetrofitCell,),
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
    variants_help="Scores that Baseline becomes, by commas. [default: KNA,QKRMSNorm]",
    examples=(
        ("--preset smoke", "the whole path, small"),
        ("--seeds 3", "the study with verdicts"),
        ("--variants KNA,KNA-logn,CosA", "other scores"),
        ('--set continued.steps=800 --set "continued.keep=[200,800]"', "more further steps"),
    ),
)

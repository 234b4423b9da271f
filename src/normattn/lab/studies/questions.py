"""What beside the norm decides: a gain, a learned scale, CosA's constant, residual scores?

Four questions that kexue 9859 leaves open. Rows are trained in the preset's setting and read
unmodified; each is compared with one other row, by its accuracy at L and by its change,

    change = accuracy(last segment after 8 L) − accuracy(last segment after L)

KRMSNorm without a gain is KNA, as √d·k/‖k‖ at scale 1/√d is k/‖k‖ at scale 1, so KNA stands for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from normattn.errors import unknown
from normattn.lab.report.claims import Claim
from normattn.lab.report.figures import Figure
from normattn.lab.report.tables import Cell, Column, Row, Table, text_column
from normattn.lab.report.view import View
from normattn.lab.stats import Metric
from normattn.lab.studies.base import Study
from normattn.lab.studies.keynorm import MATTERS
from normattn.lab.studies.language import AS_IS, TextSetting, text_runs
from normattn.lab.studies.lm_report import (
    ACCURACY,
    CHANGE,
    LEGEND,
    TRAINED,
    history_figure,
    intervals,
    past,
    position_figures,
    reading_columns,
    reading_rows,
)
from normattn.lab.studies.methods import canonical
from normattn.lab.studies.premise import EQUAL, premise
from normattn.lab.studies.preset import opened
from normattn.lab.sweep.run import Request, Sweep
from normattn.score import ScoreSpec

UNMODIFIED_CHANGE = CHANGE.at(method="")

# Questions


@dataclass(frozen=True)
class Expected:
    """What a sentence expects of a difference, in points; see `Claim`."""

    words: str
    sign: int = 1
    margin: float = 0.0


BETTER = Expected("is better at the training length than")
LOSES_LESS = Expected("loses less from L to the longest context than")


@dataclass(frozen=True)
class Question:
    """A question, and pairs of rows that answer it: the second is the reference of the first.

    Rows are spelled as their measurements are, however they were written: a pair under another
    name would be trained and left out of the page.
    """

    words: str
    pairs: tuple[tuple[str, str], ...]
    at_l: Expected = BETTER
    change: Expected = LOSES_LESS

    def __post_init__(self) -> None:
        spelled = tuple(
            (ScoreSpec.parse(row).text, ScoreSpec.parse(other).text) for row, other in self.pairs
        )
        object.__setattr__(self, "pairs", spelled)

    @property
    def rows(self) -> tuple[str, ...]:
        """The references come first."""
        others = (against for _, against in self.pairs)
        return tuple(dict.fromkeys([*others, *(row for row, _ in self.pairs)]))


QUESTIONS: Mapping[str, Question] = {
    "gain": Question(
        "Does a gain undo it?",
        (
            ("KRMSNorm", "KNA"),
            ("QKRMSNorm", "QKRMSNorm(gain=false)"),
            ("QKLayerNorm", "QKLayerNorm(gain=false)"),
        ),
        change=Expected("loses more from L to the longest context than", sign=-1),
    ),
    "learned-scale": Question(
        "Is a learned scale better?", (("QKNorm2020", "CosA"), ("Baseline-SSMax", "Baseline-logn"))
    ),
    "constant": Question(
        "Is another constant than CosA's 4 better?",
        tuple((f"CosA(c={c})", "CosA") for c in (2, 3, 3.5, 6)),
    ),
    "residual": Question(
        "Do residual scores go with normalised keys?",
        (("KNA-RealFormer", "KNA"), ("Baseline-RealFormer", "Baseline")),
        Expected(f"is as good at L (less than {EQUAL:.0f} point worse) as", margin=EQUAL),
        Expected(
            f"loses no more (by less than {MATTERS:.0f} points) from L to the longest context than",
            margin=MATTERS,
        ),
    ),
}


def resolve_questions(request: Request) -> Sweep:
    """The rows of the questions that `--variants` names; raises `InputError` as keynorm's does."""
    request.refuse_choices("questions")
    preset = opened(request, "questions")
    setting = TextSetting.of(preset)
    asked = request.variants or tuple(QUESTIONS)
    for name in asked:
        if name not in QUESTIONS:
            raise unknown("question", name, QUESTIONS)
    every = dict.fromkeys(row for name in asked for row in QUESTIONS[name].rows)
    methods = dict.fromkeys(canonical(tuple(every), setting), (AS_IS,))
    return setting.sweep(
        request, "questions", text_runs(setting, request.seeds_or(preset.seeds), methods)
    )


def pairs(view: View) -> list[Row]:
    """Every pair that was read: its two rows and the question they answer."""
    known = set(view.values("row", TRAINED))
    return [
        Row(f"{row} − {other}", {"row": row, "other": other, "question": question.words})
        for question in QUESTIONS.values()
        for row, other in question.pairs
        if {row, other} <= known
    ]


def _pair_columns(view: View) -> list[Column]:
    """The first row of a pair at L and its change; then differences to the second."""
    natural = past(ACCURACY, view, "non_repeated", method="")
    at_l = ACCURACY.at(TRAINED)
    return [
        text_column("question", "question", lambda view, row: row.where["question"]),
        _of_pair("at_l", "at L", at_l, difference=False),
        _of_pair("change", "change", UNMODIFIED_CHANGE, difference=False),
        _of_pair("at_l_difference", "difference at L", at_l),
        _of_pair("natural_difference", "difference on natural text past L", natural),
        _of_pair("change_difference", "difference in change", UNMODIFIED_CHANGE),
    ]


def _of_pair(key: str, title: str, metric: Metric, difference: bool = True) -> Column:
    def cell(view: View, row: Row) -> Cell:
        ours, theirs = (metric.at(variant=row.where[name]) for name in ("row", "other"))
        return Column(key, title, ours - theirs if difference else ours).cell(view, Row("", {}))

    # The metric says in figures that differences have a 0.
    return Column(key, title, metric - metric if difference else metric, plain=cell)


def _pair_claims(view: View) -> Iterator[Claim]:
    """Of every pair, at L and in what longer contexts change."""
    for question in QUESTIONS.values():
        for row, other in question.pairs:
            for metric, expected, matters, measured in (
                (ACCURACY.at(TRAINED), question.at_l, EQUAL, f"{row} − {other} at L, accuracy"),
                (
                    *(UNMODIFIED_CHANGE, question.change, MATTERS),
                    f"change of {row} − change of {other}, last segment",
                ),
            ):
                yield Claim(
                    f"{row} {expected.words} {other}",
                    metric.at(variant=row) - metric.at(variant=other),
                    "left open in kexue 9859",
                    *(measured, expected.sign, matters, expected.margin),
                )


def _pair_figures(view: View) -> list[Figure]:
    """Every pair's differences; accuracy by position; the trainings."""
    differences = [c for c in _pair_columns(view) if c.key.endswith("_difference")]
    title = "Differences of accuracy, in points"
    drawn = intervals(view, "questions", title, pairs(view), differences)
    return [drawn, *position_figures(view), history_figure(view)]


STUDY = Study(
    "questions",
    "Does a gain undo what a norm of queries and keys does past the training length, is a "
    "learned scale or another constant better, and do residual scores go with it?",
    title="What beside the norm decides",
    help="Train scores with and without a gain, a learned scale, other constants and residual "
    "scores; evaluate each, unmodified, at up to 8 training lengths.\n\n--variants "
    "chooses questions: " + ", ".join(QUESTIONS) + ".",
    sources=("kexue.fm/archives/9859",),
    resolve=resolve_questions,
    tables=(
        Table(
            "table",
            "",
            pairs,
            _pair_columns,
            head="row − reference",
            intro="Token accuracy in % of the first score as it is, and differences in points, "
            "paired over documents and seeds, with 95 % intervals.",
            notes=(
                "change: the last segment after the longest context minus after L, in points.",
                "KNA is KRMSNorm without a gain.",
            ),
        ),
        Table(
            "scores",
            "Every score",
            reading_rows,
            reading_columns,
            intro="Token accuracy in % (losses in nats).",
            notes=lambda view: (*premise(view, view.values("row", TRAINED)), *LEGEND),
        ),
    ),
    claims=_pair_claims,
    figures=_pair_figures,
    variants_help="Questions, by commas. [default: all]",
    examples=(
        ("--preset smoke --variants gain", "the whole path, small"),
        ("--preset workstation", "on models that copy"),
        ("--variants constant --seeds 3", "one question, with intervals over three seeds"),
    ),
)

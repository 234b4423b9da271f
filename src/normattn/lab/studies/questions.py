"""What beside the norm decides: a gain, a learned scale, CosA's constant, residual scores?

Four questions that kexue 9859 leaves open. Rows are trained in the preset's setting and read as
they are; each is held against one other row, by its accuracy at L and by the number of `factors`:

    change = accuracy(last segment after 8 L) − accuracy(last segment after L)

KRMSNorm without a gain is KNA, as √d·k/‖k‖ at scale 1/√d is k/‖k‖ at scale 1, so KNA stands for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from normattn.errors import unknown
from normattn.lab.report.claim import Claim
from normattn.lab.report.figure import Figure, IntervalColumn, Intervals
from normattn.lab.report.page import Page
from normattn.lab.report.table import Cell, Column, Row, Table
from normattn.lab.report.view import Term, View
from normattn.lab.stats.arrays import Where
from normattn.lab.studies._premise import EQUAL, premise
from normattn.lab.studies._reading import (
    ACCURACY,
    LEGEND,
    POINTS,
    TRAINED,
    change_terms,
    history_figure,
    longest,
    minus,
    position_figures,
    reading_columns,
    reading_rows,
    whole_cell,
)
from normattn.lab.studies._sentences import MATTERS
from normattn.lab.sweep.collect import measured_below
from normattn.lab.sweep.language import ReadCell, TextConfig, canonical, opened, read_sweep
from normattn.lab.sweep.reading import AS_IS
from normattn.lab.sweep.settings import Preset
from normattn.lab.sweep.study import Request, Study, Sweep, refuse_choices
from normattn.score import ScoreSpec

NAME = "questions"
SOURCE = "left open in kexue 9859"


@dataclass(frozen=True)
class Expected:
    """What a sentence expects of a difference, in points; see `Claim`."""

    words: str
    sign: int = 1
    margin: float = 0.0


@dataclass(frozen=True)
class Question:
    """A question, the rows that answer it, each with the row that it is held against.

    Rows are spelled as their measurements are, however they were written: a pair under another
    name would be trained and left out of the page.
    """

    words: str
    pairs: tuple[tuple[str, str], ...]
    at_l: Expected
    change: Expected

    def __post_init__(self) -> None:
        spelled = tuple(
            (ScoreSpec.parse(row).text, ScoreSpec.parse(other).text) for row, other in self.pairs
        )
        object.__setattr__(self, "pairs", spelled)

    @property
    def rows(self) -> tuple[str, ...]:
        """The rows held against come first."""
        others = (against for _, against in self.pairs)
        return tuple(dict.fromkeys([*others, *(row for row, _ in self.pairs)]))


BETTER = Expected("is better at the training length than")
LOSES_LESS = Expected("loses less from L to the longest context than")
QUESTIONS: Mapping[str, Question] = {
    "gain": Question(
        "Does a gain undo it?",
        (
            ("KRMSNorm", "KNA"),
            ("QKRMSNorm", "QKRMSNorm(gain=false)"),
            ("QKLayerNorm", "QKLayerNorm(gain=false)"),
        ),
        BETTER,
        Expected("loses more from L to the longest context than", sign=-1),
    ),
    "learned-scale": Question(
        "Is a learned scale better?",
        (("QKNorm2020", "CosA"), ("Baseline-SSMax", "Baseline-logn")),
        BETTER,
        LOSES_LESS,
    ),
    "constant": Question(
        "Is another constant than CosA's 4 better?",
        tuple((f"CosA(c={c})", "CosA") for c in (2, 3, 3.5, 6)),
        BETTER,
        LOSES_LESS,
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


def resolve(request: Request) -> Sweep:
    """The rows of the questions that `--variants` names; raises `InputError` as keynorm's does."""
    refuse_choices(request, NAME)
    preset = opened(request, NAME, Preset)
    config = TextConfig.of_text(preset)
    asked = request.variants or tuple(QUESTIONS)
    for name in asked:
        if name not in QUESTIONS:
            raise unknown("question", name, QUESTIONS)
    every = dict.fromkeys(row for name in asked for row in QUESTIONS[name].rows)
    methods = dict.fromkeys(canonical(tuple(every), config), (AS_IS,))
    return read_sweep(request, NAME, preset, config, methods)


def _pairs(view: View) -> list[Row]:
    """Every pair that was read: its two rows and the question they answer."""
    known = set(view.values("row", TRAINED))
    return [
        Row(f"{row} − {other}", {"row": row, "other": other, "question": question.words})
        for question in QUESTIONS.values()
        for row, other in question.pairs
        if {row, other} <= known
    ]


def _at_l(view: View, row: str) -> tuple[Term, ...]:
    return (Term(1.0, {**TRAINED, "row": row}),)


def _natural(view: View, row: str) -> tuple[Term, ...]:
    at: Where = {"row": row, "protocol": "non_repeated", "method": ""}
    length = longest(view, "non_repeated")
    return () if length is None else (Term(1.0, {**at, "length": length}),)


def _change(view: View, row: str) -> tuple[Term, ...]:
    return change_terms(view, {"row": row, "method": ""})


Measured = Callable[[View, str], tuple[Term, ...]]


def _column(key: str, title: str, measured: Measured, against: bool) -> Column:
    def cell(view: View, row: Row) -> Cell:
        terms = measured(view, str(row.where["row"]))
        if against:
            terms = minus(terms, measured(view, str(row.where["other"])))
        signed = against or measured is _change
        return whole_cell(view, POINTS if signed else ACCURACY, terms, signed)

    return Column(key, title, POINTS, plain=cell)


COLUMNS = (
    Column("question", "question", plain=lambda view, row: Cell(str(row.where["question"]))),
    _column("at_l", "at L", _at_l, against=False),
    _column("change", "change", _change, against=False),
    _column("at_l_difference", "difference at L", _at_l, against=True),
    _column("natural_difference", "difference on natural text past L", _natural, against=True),
    _column("change_difference", "difference in change", _change, against=True),
)


def claims(view: View) -> list[Claim]:
    """Of every pair, at L and in what longer contexts change."""
    return [
        claim
        for question in QUESTIONS.values()
        for row, other in question.pairs
        for claim in _of_pair(view, question, row, other)
    ]


def _of_pair(view: View, question: Question, row: str, other: str) -> Iterator[Claim]:
    for measured, expected, matters, words in (
        (_at_l, question.at_l, EQUAL, f"{row} − {other} at L, accuracy"),
        (_change, question.change, MATTERS, f"change of {row} − change of {other}, last segment"),
    ):
        terms = minus(measured(view, row), measured(view, other))
        if terms:
            yield Claim(
                f"{row} {expected.words} {other}",
                *(SOURCE, words, POINTS, terms, expected.sign, matters),
                margin=expected.margin,
            )


def figures(view: View) -> list[Figure]:
    """Every pair's differences; accuracy by position; the trainings."""
    pairs = _pairs(view)
    drawn: list[Figure] = []
    if pairs:
        panels = tuple(
            IntervalColumn(
                column.title, tuple(column.cell(view, row).estimate for row in pairs), zero=True
            )
            for column in COLUMNS
            if column.key.endswith("_difference")
        )
        title = "Differences of accuracy, in points"
        drawn.append(Intervals("questions", title, tuple(row.label for row in pairs), panels))
    return [*drawn, *position_figures(view), history_figure(view)]


PAGE = Page(
    title="What beside the norm decides",
    question="Does a gain undo what a norm of queries and keys does past the training length, is a "
    "learned scale or another constant better, and do residual scores go with it?",
    sources=("kexue.fm/archives/9859",),
    tables=(
        Table(
            "table",
            "",
            _pairs,
            COLUMNS,
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
    claims=claims,
    figures=figures,
)

STUDY = Study(
    name=NAME,
    help="Train scores with and without a gain, a learned scale, other constants and residual "
    "scores; read each as it is to 8 training lengths.\n\n--variants chooses questions: "
    + ", ".join(QUESTIONS)
    + ".",
    resolve=resolve,
    cells=(ReadCell,),
    page=PAGE,
    variants="Questions, by commas. [default: all]",
    examples=(
        ("--preset smoke --variants gain", "the whole path, small"),
        ("--preset workstation", "on models that copy"),
        ("--variants constant --seeds 3", "one question, with intervals over three seeds"),
    ),
    collect=measured_below,
)

"""What the trainings with one change each show: tables, claims and figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from normattn.lab.report.claim import Claim
from normattn.lab.report.figure import Figure, IntervalColumn, Intervals
from normattn.lab.report.page import Page
from normattn.lab.report.table import NOTHING, Cell, Column, Row, Table
from normattn.lab.report.view import Term, View
from normattn.lab.studies._reading import ACCURACY, POINTS, SEEN, change_terms, whole_cell
from normattn.lab.studies._sentences import MATTERS
from normattn.lab.studies.factors.changes import AS_PRESET, CHANGES, words

SCORES = ("Baseline", "KNA")
CHANGE, SCORE = "factor.change", "factor.row"


def rows(view: View) -> list[Row]:
    """The changes whose models were read, the preset as it is first."""
    known = view.values(CHANGE, {"protocol": "last_segment", "method": ""})
    order = {name: number for number, name in enumerate(CHANGES)}
    ranked = sorted(known, key=lambda name: (order.get(name, len(order)), name))
    return [Row(words(name), {CHANGE: name}) for name in ranked]


def columns(view: View) -> Sequence[Column]:
    """How good the models are at L, whether they copy, and what a longer context does."""
    all_columns = []
    for score in SCORES:
        at_l = {"protocol": "train_length", SCORE: score}
        all_columns.append(Column(f"{score}_at_l", f"{score} at L", ACCURACY, ((1.0, at_l),)))
        all_columns.append(
            Column(f"{score}_copies", f"{score}, copies at L", SEEN, plain=_copying(score))
        )
    for score in SCORES:
        all_columns.append(_of(f"{score}_change", f"change of {score}", {score: 1.0}))
    all_columns.append(_of("gap", "change of KNA − of Baseline", {"KNA": 1.0, "Baseline": -1.0}))
    all_columns.append(
        _of("effect", "effect on KNA's change", {"KNA": 1.0}, lambda change: AS_PRESET)
    )
    if _several(view):
        all_columns.append(
            _of("last", "effect of the last of several", {"KNA": 1.0}, _without_last)
        )
    return all_columns


def _several(view: View) -> bool:
    """Whether changes were joined."""
    return any(_without_last(str(row.where[CHANGE])) for row in rows(view))


def _without_last(change: str) -> str | None:
    """What a joined change adds its last part to; None for a single one."""
    return change.rpartition("+")[0] or None


def _copying(score: str) -> Callable[[View, Row], Cell]:
    """Tiled text within the training length, tokens whose answer stands earlier."""

    def cell(view: View, row: Row) -> Cell:
        at = {**row.where, "protocol": "repeated", SCORE: score}
        sums, lengths = view.sums(SEEN.name, at), view.values("train_length", at)
        if sums is None:
            return NOTHING
        within = [n for n, (*_, end) in enumerate(sums.bins) if end <= lengths[0]]
        return Column("", "", SEEN, ((1.0, at),), bins=within).cell(view, Row("", {}))

    return cell


Against = Callable[[str], str | None]
"""Which change another one is held against, if any."""


def _of(
    key: str, title: str, factors: Mapping[str, float], against: Against | None = None
) -> Column:
    """Σ factor · change of a score; `against`: minus the same under another change."""

    def cell(view: View, row: Row) -> Cell:
        change = str(row.where[CHANGE])
        other = None if against is None else against(change)
        if against is not None and (
            other in (None, change) or not _comparable(view, change, other)
        ):
            return NOTHING
        return whole_cell(view, POINTS, _terms(view, change, factors, other), signed=True)

    return Column(key, title, POINTS, plain=cell)


def _terms(
    view: View, change: str, factors: Mapping[str, float], other: str | None = None
) -> tuple[Term, ...]:
    terms: list[Term] = []
    for score, factor in factors.items():
        at = {SCORE: score, "method": ""}
        terms += change_terms(view, {**at, CHANGE: change}, factor)
        if other is not None:
            terms += change_terms(view, {**at, CHANGE: other}, -factor)
    return tuple(terms)


def _comparable(view: View, change: str, other: str | None = AS_PRESET) -> bool:
    """Whether the other change was read too, in the same documents."""
    units = [
        set(view.values("unit", {CHANGE: name, "protocol": "last_segment"}))
        for name in (change, other)
    ]
    return bool(units[0] & units[1])


def claims(view: View) -> list[Claim]:
    """Of every change whether it takes away KNA's loss."""
    return [
        Claim(
            f"{row.label}: KNA loses less from L to the longest context",
            "asked here, as kexue 9859 differs",
            "change of KNA − its change in the preset as it is, last segment",
            POINTS,
            _terms(view, str(row.where[CHANGE]), {"KNA": 1.0}, AS_PRESET),
            matters=MATTERS,
        )
        for row in rows(view)
        if row.where[CHANGE] != AS_PRESET and _comparable(view, row.where[CHANGE])
    ]


def figures(view: View) -> list[Figure]:
    """The change of either score under every change of the setting."""
    shown, made = rows(view), {column.key: column for column in columns(view)}
    panels = tuple(
        IntervalColumn(
            made[key].title, tuple(made[key].cell(view, row).estimate for row in shown), zero=True
        )
        for key in ("Baseline_change", "KNA_change", "gap")
    )
    title = "Accuracy of the last segment after the longest context minus after L, in points"
    return [Intervals("factors", title, tuple(row.label for row in shown), panels)]


def notes(view: View) -> tuple[str, ...]:
    """What the columns are."""
    always = (
        "copies at L: tiled text within the training length, the tokens whose answer "
        "stands earlier. A model that copies no better than it reads has little to lose.",
        "effect: the change of KNA minus that in the preset as it is, paired over "
        "documents and seeds; none for a text that shares no document.",
    )
    last = (
        "effect of the last of several: of changes that are joined, minus the change of KNA under "
        "all of them but the last."
    )
    return (*always, last) if _several(view) else always


PAGE = Page(
    title="Why KeyNorm decays",
    question="Which difference to the source's setting makes a small model with normalised keys "
    "lose accuracy past its training length?",
    sources=("kexue.fm/archives/9859",),
    tables=(
        Table(
            "table",
            "",
            rows,
            columns,
            head="change",
            intro="Token accuracy in %; change: the last segment after the longest context minus "
            "after L, in points, with 95 % intervals over documents and seeds.",
            notes=notes,
        ),
    ),
    claims=claims,
    figures=figures,
)

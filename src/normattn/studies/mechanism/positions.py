"""Two questions that the source leaves open: norms and positions, ranges and unseen positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from normattn.diagnostics.key_norms import FIRST
from normattn.diagnostics.ranges import REGIONS, TAIL
from normattn.measure.statistic import Array, Statistic, Value, mean
from normattn.report.claim import Claim
from normattn.report.table import NOTHING, Cell, Column, Row, Table, shown
from normattn.report.view import Term, View
from normattn.studies._reading import VARIANT_ORDER, ranked
from normattn.studies.mechanism.measured import lengths, where

SOURCE = "kexue 9859, left open"
SIDES = (("", "as the score sees it"), ("raw_", "before the norm"))
REST = f"the first {FIRST} keys left out"


def _of_first(chosen: slice) -> Value:
    """The mean over texts, heads and the `chosen` of the first keys."""

    def value(above: Array, below: Array, *whole: Array) -> Array:
        parts = (x.reshape(*x.shape[:-1], -1, FIRST)[..., chosen] for x in (above, below))
        total, count = (part.sum((-2, -1)) for part in parts)
        return np.asarray(_share(total, count))

    return value


def _by_region(weights: Callable[[Array, Array], Array], name: str, title: str) -> Statistic:
    """Per cent, made of the sums over heads of each of the `REGIONS`."""

    def value(above: Array, below: Array, *whole: Array) -> Array:
        parts = (x.reshape(*x.shape[:-1], -1, len(REGIONS)).sum(-2) for x in (above, below))
        return np.asarray(100 * weights(*parts))

    return Statistic(name, title, value, "%", 2)


def _share(part: Array, whole: Array) -> Array:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(whole > 0, part / whole, np.nan)


def _outside(region: int) -> Callable[[Array, Array], Array]:
    """Of the pairs nearer than L (0) or further (1), the share outside the range."""
    inside, outside = 2 * region, 2 * region + 1
    return lambda above, _: _share(above[..., outside], above[..., inside] + above[..., outside])


def _attention(*signs: int) -> Callable[[Array, Array], Array]:
    """Shares of attention in the regions, added up with these signs."""
    return lambda above, below: (_share(above, below) * np.array(signs)).sum(-1)


SIZE = mean("position_size", "size")
NEAR = _by_region(_outside(0), "pairs", "pairs nearer than L, outside")
FAR = _by_region(_outside(1), "pairs", "pairs at L and further, outside")
FURTHER = _by_region(lambda *sums: _outside(1)(*sums) - _outside(0)(*sums), "pairs", "far − near")
ATTENDED = (
    _by_region(_attention(0, 1, 0, 0), "attention", "attention nearer than L, outside"),
    _by_region(_attention(0, 0, 0, 1), "attention", "attention at L and further, outside"),
    _by_region(_attention(0, 0, 1, 0), "attention", "attention at L and further, inside"),
)
UNSEEN = _by_region(_attention(0, -1, 1, -1), "attention", "further and inside − outside")


def tables() -> tuple[Table, Table]:
    """What ‖k_j‖ says of j, and where cosines leave their range."""
    return (
        Table(
            "positions",
            "Does a key's norm carry its position?",
            lambda view: _rows(view, "raw_position"),
            tuple(column for side in SIDES for column in _norm_columns(*side)),
            notes=(
                "rank correlation: Spearman's, between ‖k_j‖ and j within a text of the training "
                f"length, {REST}; mean over layers, heads of keys and texts. Above 0 norms grow "
                "with the position; heads of opposite signs cancel.",
                "heads + / − / all: heads of all trained models, those whose own interval over "
                "documents lies above or below 0; by chance one of forty is above and one below.",
                "size: the same with each document's sign turned by that which its head has in "
                "the other documents, so that heads of opposite signs add up. Chance gives 0, also "
                "where neighbouring keys have similar norms, which would raise a mean of |ρ|.",
                f"first key, next {FIRST - 1}: their norm over the median norm of all after them.",
            ),
        ),
        Table(
            "distances",
            "Where do cosines leave their trained range?",
            lambda view: _rows(view, "pairs"),
            _range_columns,
            notes=(
                f"outside: the cosine lies outside the range that its head has at L ({TAIL:.1%} "
                "left out at either end, so that up to twice as much is outside at L itself). "
                "Nearer than L: at a distance i − j < L, which was trained; at L and further: "
                "which was not. Of the pairs of each kind, read at the longer length.",
                "attention: of all attention of the queries at i ≥ L, mean over heads; what is "
                "left of 100 is inside the range at trained distances, or a sink's.",
            ),
        ),
    )


def _norm_columns(side: str, said: str) -> list[Column]:
    position, first = f"{side}position", f"{side}first_norms"
    at = f" ({said})"
    one, more = (
        Statistic(first, "", _of_first(part), "", 2) for part in (slice(1), slice(1, None))
    )
    size = SIZE if not side else mean(f"{side}position_size", "size")
    return [
        _column(position, "rank correlation" + at, mean(position, ""), "one norm"),
        Column(f"{side}position_heads", "heads + / − / all" + at, plain=_heads_of(position)),
        _column(f"{side}position_size", "size" + at, size),
        _column(f"{side}first_key", "first key" + at, one),
        _column(f"{side}next_keys", f"next {FIRST - 1}" + at, more),
    ]


def _range_columns(view: View) -> Sequence[Column]:
    longer = lengths(view)[1]
    columns = (("near", NEAR), ("far", FAR), ("further", FURTHER))
    attended = zip(("near_attention", "far_attention", "far_inside"), ATTENDED, strict=True)
    return [
        _column(key, f"{statistic.title}, %", statistic, length=longer)
        for key, statistic in (*columns, *attended)
    ]


def _rows(view: View, statistic: str) -> list[Row]:
    """The scores of which a statistic was measured."""
    names = view.values("row", {"protocol": "mechanism", "statistic": statistic})
    return [Row(name, {"row": name}) for name in ranked(names, VARIANT_ORDER)]


def _column(
    key: str, title: str, statistic: Statistic, without: str = NOTHING.text, **more: int
) -> Column:
    """A statistic at L; `without` where it is no number."""

    def cell(view: View, row: Row) -> Cell:
        estimate = view.estimate(statistic, {**row.where, **where(view, **more)})
        if estimate is None:
            return NOTHING
        if not np.isfinite(estimate.value):
            return Cell(without)
        return Cell(shown(estimate, statistic.digits), estimate)

    return Column(key, title, plain=cell)


def heads(view: View, row: str, statistic: str) -> str | None:
    """Heads of every trained model whose own interval lies above 0, below 0, and all of them."""
    at = {"row": row, **where(view)}
    sums = view.sums(statistic, at)
    if sums is None or not sums.of.any():
        return None
    only = mean(statistic, "")
    own = [
        view.estimate(only, {**at, "seed": seed, "layer": layer, "head": head})
        for seed in sums.seeds
        for layer, head, *_ in sums.bins
    ]
    above = sum(head is not None and head.above_zero for head in own)
    below = sum(head is not None and head.below_zero for head in own)
    return f"{above} / {below} / {len(own)}"


def _heads_of(statistic: str) -> Callable[[View, Row], Cell]:
    def cell(view: View, row: Row) -> Cell:
        counted = heads(view, row.where["row"], statistic)
        return NOTHING if counted is None else Cell(counted)

    return cell


def claims(view: View) -> list[Claim]:
    """What would answer the two questions with yes; a frame without the measures tests none."""
    near, longer = lengths(view)
    counted = heads(view, "Baseline", "position")
    carries = Claim(
        "a key's norm carries its position",
        SOURCE,
        "Baseline: rank correlation of ‖k‖ and its position, its size whichever its sign (heads "
        f"+ / − / all: {counted})",
        SIZE,
        (Term(1.0, where(view, row="Baseline")),),
    )
    leave, attend = (
        [
            Claim(sentence.format(row), SOURCE, f"{row}: {measured}", statistic, (Term(1.0, at),))
            for row in ("Baseline", "KNA")
            for at in [where(view, row=row, length=longer)]
        ]
        for sentence, measured, statistic in (
            (
                "{}'s cosines leave their trained range at unseen distances rather than at "
                "trained ones",
                f"share of pairs outside, at i − j ≥ {near:,} − nearer",
                FURTHER,
            ),
            (
                "on longer text {} attends to unseen distances within the trained range of "
                "cosines more than to anything outside it",
                f"share of attention of queries after {near:,}",
                UNSEEN,
            ),
        )
    )
    return [carries, *leave, *attend]

"""Records → rows: every metric of every (variant, method), diverged cells included."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from normattn.errors import InputError
from normattn.reports.bootstrap import Bootstrap
from normattn.reports.cells import Cells, RecordLike, RowKey, row_labels
from normattn.reports.metrics import METRICS, TAX, Estimate, Metric, difference, estimate

COLUMNS = ("train", "repeated", "repeated_seen", "non_repeated", "last_segment", "tax")
"""The columns of table.md and of the heat map."""

KEYS = (*METRICS, "tax")
"""The metrics of a row in table.json."""


@dataclass(frozen=True)
class Divergence:
    """A training run whose loss stopped being finite: a result, shown as such."""

    variant: str
    step: int
    where: str
    seed: int = 0
    spec: str = ""
    train_length: int | None = None


@dataclass(frozen=True)
class Row:
    """One (variant, method): its metrics (None where not measured) and its diverged runs."""

    key: RowKey
    seeds: tuple[int, ...]
    lengths: Mapping[str, int]
    metrics: Mapping[str, Estimate | None]
    diverged: tuple[Divergence, ...] = field(default=())
    label: str = ""

    @property
    def name(self) -> str:
        """The row's label, e.g. "KNA-logn-YaRN"; its whole specification where others share it."""
        return self.label or self.key.name

    @property
    def empty(self) -> bool:
        """Whether nothing was measured: every run of the row diverged."""
        return all(value is None for value in self.metrics.values())

    def as_json(self) -> dict[str, Any]:
        """The row object of table.json; "diverged" stands only in rows with a diverged run."""
        row: dict[str, Any] = {
            "name": self.key.name,
            "variant": self.key.variant,
            "method": self.key.method,
            "spec": self.key.spec,
            "train_length": self.key.train_length,
            "seeds": list(self.seeds),
            "lengths": dict(self.lengths),
        }
        for key, value in self.metrics.items():
            row[key] = None if value is None else value.as_json()
        if self.diverged:
            first = self.diverged[0]
            row["diverged"] = {"step": first.step, "where": first.where, "seed": first.seed}
            row["diverged_seeds"] = [each.seed for each in self.diverged]
        return row


def table_rows(
    records: Iterable[RecordLike] | Cells,
    diverged: Sequence[Divergence | Mapping[str, Any]] = (),
    bootstrap: Bootstrap | None = None,
) -> list[Row]:
    """The rows in the order of the table: variants, each with the model as it is first.

    The train-length column of a method is the unmodified model's, as in the source; what a method
    costs at the training length when it is switched on there is its tax (a paired difference in
    points; None for the model as it is). A diverged run appears in every method's row.
    """
    cells = records if isinstance(records, Cells) else Cells(records)
    drawn = bootstrap or Bootstrap()
    failures = sorted((_divergence(each) for each in diverged), key=lambda d: (d.variant, d.seed))
    rows = [_row(cells, key, failures, drawn) for key in cells.rows]
    rows += [
        Row(key, (), {}, dict.fromkeys(KEYS), tuple(d for d in failures if d.variant == variant))
        for variant in sorted({d.variant for d in failures} - {row.key.variant for row in rows})
        for key in _missing_rows(cells, variant, failures)
    ]
    return _labelled(sorted(rows, key=lambda row: row.key.order))


def _labelled(rows: list[Row]) -> list[Row]:
    """Rows of one name (say, two factors) are told apart by their whole specification."""
    labels = row_labels(row.key for row in rows)
    return [
        row if labels[row.key] == row.key.name else replace(row, label=labels[row.key])
        for row in rows
    ]


def _row(cells: Cells, key: RowKey, failures: list[Divergence], bootstrap: Bootstrap) -> Row:
    metrics = {name: _measure(cells, key, metric, bootstrap) for name, metric in METRICS.items()}
    metrics["tax"] = _tax(cells, key, bootstrap)
    protocols = {metric.protocol: None for metric in METRICS.values()}
    found = {protocol: cells.get(key, protocol) for protocol in protocols}
    return Row(
        key=key,
        seeds=tuple(sorted({seed for cell in found.values() if cell for seed in cell.seeds})),
        lengths={protocol: cell.length for protocol, cell in found.items() if cell},
        metrics=metrics,
        diverged=tuple(d for d in failures if d.variant == key.variant),
    )


def _measure(cells: Cells, key: RowKey, metric: Metric, bootstrap: Bootstrap) -> Estimate | None:
    source = cells.as_is(key) if metric.protocol == TAX.protocol else key
    cell = None if source is None else cells.get(source, metric.protocol)
    return None if cell is None else estimate(cell, metric, bootstrap)


def _tax(cells: Cells, key: RowKey, bootstrap: Bootstrap) -> Estimate | None:
    as_is = cells.as_is(key)
    if not key.method or as_is is None:
        return None
    with_method, without = (cells.get(each, TAX.protocol) for each in (key, as_is))
    if with_method is None or without is None:
        return None
    return difference(with_method, without, TAX, bootstrap)


def _missing_rows(cells: Cells, variant: str, failures: list[Divergence]) -> list[RowKey]:
    """Rows of a variant none of whose runs can be evaluated: one per method of the table."""
    first = next(d for d in failures if d.variant == variant)
    methods = list(dict.fromkeys(row.method for row in cells.rows)) or [""]
    length = first.train_length or next((row.train_length for row in cells.rows), 0)
    names = {method: "-".join(filter(None, (variant, method))) for method in methods}
    return [
        RowKey(variant, method, (first.spec or name) if not method else name, length, name)
        for method, name in names.items()
    ]


def _divergence(value: Divergence | Mapping[str, Any]) -> Divergence:
    if isinstance(value, Divergence):
        return value
    try:
        return Divergence(**value)
    except TypeError:
        expected = "variant, step, where and optionally seed, spec, train_length"
        raise InputError(
            f"a diverged run is described by {expected}, but its fields are {', '.join(value)}"
        ) from None

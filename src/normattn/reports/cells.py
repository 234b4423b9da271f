"""Records gathered into cells: sums over seeds × documents × bins, ready to be resampled."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normattn.errors import InputError
from normattn.reports.cell_record import CellRecord
from normattn.reports.records import Record, parse_record

Array = NDArray[np.float64]
RecordLike = Record | Mapping[str, Any]

FIELDS = ("tokens", "correct", "loss", "seen_tokens", "seen_correct")

# The order of the literature's tables; others follow by name.
VARIANT_ORDER = (
    *("Baseline", "Baseline-logn", "QNA", "QNA-logn"),
    *("KNA", "KNA-logn", "CosA", "CosA-logn"),
)
METHOD_ORDER = ("", "NTK", "YaRN", "ReRoPE")


@dataclass(frozen=True)
class RowKey:
    """What makes a row: trained variant, post-hoc method, the whole specification, its L."""

    variant: str
    method: str
    spec: str
    train_length: int
    name: str

    @property
    def order(self) -> tuple[int, str, int, str, str]:
        """Where the row stands: variants, then methods with the model as it is first."""
        return (
            _rank(self.variant, VARIANT_ORDER),
            self.variant,
            _rank(self.method, METHOD_ORDER),
            self.method,
            self.spec,
        )


def row_labels(rows: Iterable[RowKey]) -> dict[RowKey, str]:
    """What each row is called: its name; its whole specification where others share the name."""
    distinct = list(dict.fromkeys(rows))
    count = Counter(row.name for row in distinct)
    return {row: row.spec if count[row.name] > 1 else row.name for row in distinct}


def method_labels(rows: Iterable[RowKey]) -> dict[RowKey, str]:
    """What a row's method is called among rows of one variant: as `row_labels` does."""
    distinct = list(dict.fromkeys(rows))
    count = Counter(row.method for row in distinct)
    return {row: row.spec if count[row.method] > 1 else row.method for row in distinct}


@dataclass(frozen=True)
class Cell:
    """All seeds of one row under one protocol at one length.

    `sums` holds arrays (seeds, documents, bins) by field; seeds ascend, documents are sorted by
    name, and a document's windows are added up.
    """

    row: RowKey
    protocol: str
    length: int
    seeds: tuple[int, ...]
    documents: tuple[str, ...]
    edges: tuple[int, ...]
    data: str
    sums: Mapping[str, Array]

    def only_seeds(self, seeds: Sequence[int]) -> Cell:
        """The same cell made of some of its seeds."""
        kept = [self.seeds.index(seed) for seed in seeds]
        sums = {field: values[kept] for field, values in self.sums.items()}
        return Cell(
            self.row,
            self.protocol,
            self.length,
            tuple(seeds),
            self.documents,
            self.edges,
            self.data,
            sums,
        )


class Cells:
    """Every cell that a list of records makes, found by row, protocol and length.

    Rows can be compared only on one set: where a protocol was measured on several sets of one
    length, the set with the most records counts (then the larger one) and `left_out` counts the
    records on the others.
    """

    def __init__(self, records: Iterable[RecordLike]) -> None:
        parsed = [parse_record(value, f"record {index}") for index, value in enumerate(records)]
        kept = _on_common_sets(parsed)
        self.left_out = len(parsed) - len(kept)
        groups: dict[tuple[RowKey, str, int], list[Record]] = defaultdict(list)
        for record in kept:
            groups[row_key(record), record.protocol, record.length].append(record)
        self._cells = {key: gather(group) for key, group in groups.items()}
        self.rows = sorted({row for row, _, _ in groups}, key=lambda row: row.order)

    def get(self, row: RowKey, protocol: str, length: int | None = None) -> Cell | None:
        """A row's cell; at the longest length that the table shows unless `length` is given."""
        shown = self.shown_length(protocol, row.train_length) if length is None else length
        return None if shown is None else self._cells.get((row, protocol, shown))

    def lengths(self, row: RowKey, protocol: str) -> list[int]:
        """The lengths at which a row was tested under a protocol, ascending."""
        return sorted(key[2] for key in self._cells if key[:2] == (row, protocol))

    def shown_length(self, protocol: str, train_length: int) -> int | None:
        """The longest length shared by all rows tested under a protocol (or the longest of any)."""
        tested = [
            set(lengths)
            for row in self.rows
            if row.train_length == train_length and (lengths := self.lengths(row, protocol))
        ]
        if not tested:
            return None
        return max(set.intersection(*tested) or set.union(*tested))

    def as_is(self, row: RowKey) -> RowKey | None:
        """The row of the same trained variant without any post-hoc method."""
        same = (row.variant, row.train_length)
        found = (r for r in self.rows if (r.variant, r.train_length) == same and not r.method)
        return next(found, None)


def _on_common_sets(records: Sequence[Record]) -> list[Record]:
    """The records on the set that most records of their protocol and length share."""
    sets: dict[tuple[str, int, int], dict[str, list[Record]]] = defaultdict(dict)
    for record in records:
        place = (record.protocol, record.length, record.train_length)
        sets[place].setdefault(record.data, []).append(record)
    kept = set()
    for by_data in sets.values():
        ranks = {data: (len(g), len(g[0].documents), data) for data, g in by_data.items()}
        kept.add(max(ranks, key=lambda data: ranks[data]))
    return [record for record in records if record.data in kept]


def gather(records: Sequence[RecordLike]) -> Cell:
    """Pool the records of one cell, one per seed.

    Raises `InputError` when they are of different cells or sets, or when a seed comes twice with
    different weights.
    """
    parsed = [parse_record(value, f"record {index}") for index, value in enumerate(records)]
    if not parsed:
        raise InputError("a cell needs at least one record, but none was given")
    by_seed: dict[int, Record] = {}
    for record in parsed:
        _refuse_mixture(parsed[0], record)
        other = by_seed.setdefault(record.seed, record)
        if other.key != record.key:
            raise InputError(
                f"seed {record.seed} of {record.name} ({record.protocol}, {record.length} tokens) "
                f"was evaluated twice with different weights: runs {other.run} and {record.run}; "
                "report them apart"
            )
    first = parsed[0]
    seeds = tuple(sorted(by_seed))
    documents = tuple(sorted(set(first.documents)))
    place = {name: index for index, name in enumerate(documents)}
    rows = np.array([place[name] for name in first.documents])
    sums = {}
    for field in FIELDS:
        values = np.zeros((len(seeds), len(documents), len(first.edges) - 1))
        for index, seed in enumerate(seeds):
            np.add.at(values[index], rows, by_seed[seed].counts(field))
        sums[field] = values
    return Cell(
        row_key(first),
        first.protocol,
        first.length,
        seeds,
        documents,
        first.edges,
        first.data,
        sums,
    )


def _refuse_mixture(first: Record, record: Record) -> None:
    cells = [(row_key(r), r.protocol, r.length) for r in (first, record)]
    if cells[0] != cells[1]:
        raise InputError(
            f"records of different cells cannot be pooled: {first.spec} under {first.protocol} at "
            f"{first.length}, and {record.spec} under {record.protocol} at {record.length}"
        )
    if first.data != record.data or first.edges != record.edges:
        raise InputError(
            f"the seeds {first.seed} and {record.seed} of {record.name} were evaluated on "
            f"different {record.protocol} sets of {record.length} tokens; evaluate both on one set"
        )


def row_key(record: CellRecord) -> RowKey:
    """The row that a record belongs to."""
    return RowKey(record.variant, record.method, record.spec, record.train_length, record.name)


def _rank(value: str, order: tuple[str, ...]) -> int:
    return order.index(value) if value in order else len(order)

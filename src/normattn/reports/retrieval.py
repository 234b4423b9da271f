"""Retrieval records → shares of right answers by depth and length, with intervals.

Intervals resample the samples of a set (and the seeds, where several were trained), as
`reports.bootstrap` says; a sample is asked at every depth and drawn as a whole, so depths, lengths
and methods share the draws.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from normattn.errors import InputError
from normattn.reports.bootstrap import Bootstrap, ratio
from normattn.reports.cells import RowKey, row_key, row_labels
from normattn.reports.markdown import FEW, few_note, grid
from normattn.reports.retrieval_record import RetrievalRecord

TITLES = {
    "passkey": "passkey",
    "multi_key": "multi-key",
    "variable_tracking": "variable tracking",
}
"""The tasks in the order of the report, as they are spoken of."""


@dataclass(frozen=True)
class Share:
    """A share in %, and the ends of its interval (None for a single sample)."""

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.1f} [no interval]"
        return f"{self.value:.1f} [{self.low:.1f}, {self.high:.1f}]"


@dataclass(frozen=True)
class RetrievalCell:
    """One row, one task, one length: all seeds pooled.

    `exact` are the shares of answers right as a whole at each of `depths`, `overall` at all of
    them; `tokens` and `token` the same of their tokens.
    """

    row: RowKey
    task: str
    length: int
    depths: tuple[float, ...]
    exact: tuple[Share, ...]
    overall: Share
    tokens: tuple[Share, ...]
    token: Share
    samples: int
    seeds: int


def retrieval_cells(
    records: Iterable[RetrievalRecord], bootstrap: Bootstrap | None = None
) -> list[RetrievalCell]:
    """Every cell that the records make, rows in the order of the table, then by task and length.

    Rows are compared on one set: of several sets of one task and length the one with the most
    records counts. Raises `InputError` when a seed comes twice with different weights.
    """
    groups: dict[tuple[RowKey, str, int], list[RetrievalRecord]] = defaultdict(list)
    for record in _on_common_sets(list(records)):
        groups[row_key(record), record.task, record.length].append(record)
    tasks = list(TITLES)
    order = sorted(groups, key=lambda k: (k[0].order, tasks.index(k[1]), k[2]))
    return [_pooled(groups[key], bootstrap or Bootstrap()) for key in order]


def retrieval_markdown(cells: Sequence[RetrievalCell], bootstrap: Bootstrap) -> str:
    """retrieval.md: for each task a table of whole answers and one of their tokens."""
    parts = [
        "# Retrieval past the training length",
        f"Facts stated in held-out text and asked for at its end, in % over all depths, with "
        f"{100 * bootstrap.level:g}% intervals from {bootstrap.resamples} bootstrap resamples of "
        "the samples (and of the seeds where there are several). An answer is right when every "
        "token of it is the model's first choice. The cells by depth are in retrieval.csv and the "
        "figures.",
    ]
    for length in sorted({cell.row.train_length for cell in cells}):
        here = [cell for cell in cells if cell.row.train_length == length]
        for task in (name for name in TITLES if any(cell.task == name for cell in here)):
            shown = [cell for cell in here if cell.task == task]
            title = TITLES[task][:1].upper() + TITLES[task][1:]
            parts += [f"## {title}: whole answers", _table(shown, "overall")]
            parts += [f"## {title}: tokens of the answers", _table(shown, "token")]
            counts = sorted({(c.samples, len(c.depths), c.seeds) for c in shown})
            behind = "; ".join(f"{n} samples at {d} depths, seeds: {s}" for n, d, s in counts)
            few = any(cell.samples < FEW for cell in shown)
            parts.append(f"Behind each value: {behind}.{few_note('samples') if few else ''}")
    return "\n\n".join(parts) + "\n"


def retrieval_lines(cells: Sequence[RetrievalCell]) -> tuple[list[str], list[list[object]]]:
    """The head and the lines of retrieval.csv: one depth of one cell a line."""
    head = ["name", "variant", "method", "spec", "train_length", "task", "length", "depth"]
    head += ["exact", "low", "high", "tokens", "tokens_low", "tokens_high", "samples", "seeds"]
    lines: list[list[object]] = []
    for cell in cells:
        key = cell.row
        start: list[object] = [key.name, key.variant, key.method, key.spec, key.train_length]
        for depth, exact, tokens in zip(cell.depths, cell.exact, cell.tokens, strict=True):
            place = [cell.task, cell.length, depth]
            values = [value for s in (exact, tokens) for value in (s.value, s.low, s.high)]
            lines.append([*start, *place, *values, cell.samples, cell.seeds])
    return head, lines


def _on_common_sets(records: Sequence[RetrievalRecord]) -> list[RetrievalRecord]:
    sets: dict[tuple[str, int, int], dict[str, list[RetrievalRecord]]] = defaultdict(dict)
    for record in records:
        place = (record.task, record.length, record.train_length)
        sets[place].setdefault(record.data, []).append(record)
    kept = {
        max(by_data, key=lambda d: (len(by_data[d]), len(by_data[d][0].documents), d))
        for by_data in sets.values()
    }
    return [record for record in records if record.data in kept]


def _pooled(records: Sequence[RetrievalRecord], bootstrap: Bootstrap) -> RetrievalCell:
    by_seed: dict[int, RetrievalRecord] = {}
    for record in records:
        other = by_seed.setdefault(record.seed, record)
        if other.key != record.key:
            raise InputError(
                f"seed {record.seed} of {record.name} ({record.task}, {record.length} tokens) was "
                f"evaluated twice with different weights: runs {other.run} and {record.run}; "
                "report them apart"
            )
    first = records[0]
    sums = {
        field: np.stack([by_seed[seed].counts(field) for seed in sorted(by_seed)])
        for field in ("exact", "answers", "correct", "tokens")
    }
    whole = {field: values.sum(axis=2, keepdims=True) for field, values in sums.items()}
    return RetrievalCell(
        row=row_key(first),
        task=first.task,
        length=first.length,
        depths=first.depths,
        exact=_shares(sums["exact"], sums["answers"], bootstrap),
        overall=_shares(whole["exact"], whole["answers"], bootstrap)[0],
        tokens=_shares(sums["correct"], sums["tokens"], bootstrap),
        token=_shares(whole["correct"], whole["tokens"], bootstrap)[0],
        samples=len(first.documents),
        seeds=len(by_seed),
    )


def _shares(
    part: NDArray[np.float64], whole: NDArray[np.float64], bootstrap: Bootstrap
) -> tuple[Share, ...]:
    values = 100 * ratio(part, whole)
    if part.shape[1] == 1:
        return tuple(Share(_rounded(value), None, None) for value in values)
    ends = bootstrap.interval(100 * bootstrap.samples(part, whole))
    return tuple(
        Share(_rounded(value), _rounded(low), _rounded(high))
        for value, low, high in zip(values, *ends, strict=True)
    )


def _table(cells: Sequence[RetrievalCell], kind: str) -> str:
    lengths = sorted({cell.length for cell in cells})
    unit = cells[0].row.train_length
    found = {(cell.row, cell.length): str(getattr(cell, kind)) for cell in cells}
    labels = row_labels(cell.row for cell in cells)
    head = ["score", *(f"{length:,} ({length / unit:g}×)" for length in lengths)]
    lines = [
        (label, *(found.get((row, length), "–") for length in lengths))
        for row, label in labels.items()
    ]
    return grid(head, lines)


def _rounded(value: float) -> float:
    return round(float(value), 9) + 0.0

"""Findings: a difference is claimed only where its paired interval excludes 0."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from normattn.errors import InputError
from normattn.reports.bootstrap import Bootstrap
from normattn.reports.cells import Cells, RecordLike, RowKey, gather
from normattn.reports.metrics import METRICS, Estimate, Metric, difference


@dataclass(frozen=True)
class Claim:
    """ "A above B", tested: the paired difference, whether it was found, and the sentence."""

    sentence: str
    found: bool
    difference: Estimate


def paired_difference(
    records_a: Sequence[RecordLike],
    records_b: Sequence[RecordLike],
    metric: str | None = None,
    bootstrap: Bootstrap | None = None,
) -> Estimate:
    """The accuracy (in points) of one cell minus that of another, paired.

    Each list holds the records of one cell, one per seed. Documents and seeds are resampled
    together for both; only seeds that both have are used. `metric` is a key of `METRICS` (default:
    the accuracy over all tokens of the records' protocol). Raises `InputError` when the cells do
    not share their evaluation set or a seed.
    """
    a, b = gather(records_a), gather(records_b)
    if a.protocol != b.protocol:
        raise InputError(f"{a.protocol} and {b.protocol} are different protocols")
    chosen = _metric(metric) if metric else _accuracy_of(a.protocol)
    return difference(a, b, chosen, bootstrap or Bootstrap())


def claim(
    records: Iterable[RecordLike] | Cells,
    above: str,
    below: str,
    metric: str = "non_repeated",
    *,
    length: int | None = None,
    bootstrap: Bootstrap | None = None,
) -> Claim:
    """Test "`above` is above `below`" between two rows, by their names, e.g. "KNA", "Baseline".

    Found only where the interval of the difference, paired over documents and seeds, lies above
    0; otherwise the sentence says that it was not found. Raises `InputError` for rows that the
    records do not hold.
    """
    cells = records if isinstance(records, Cells) else Cells(records)
    chosen = _metric(metric)
    found = [cells.get(_row(cells, name), chosen.protocol, length) for name in (above, below)]
    if found[0] is None or found[1] is None:
        missing = above if found[0] is None else below
        raise InputError(f"{missing} was not evaluated {chosen.phrase}")
    gap = difference(found[0], found[1], chosen, bootstrap or Bootstrap())
    return Claim(_sentence(above, below, chosen, gap), gap.above_zero, gap)


def _sentence(above: str, below: str, metric: Metric, gap: Estimate) -> str:
    digits, unit = (1, "points") if metric.scale == 100 else (3, "nats")
    said = f"{above} above {below} {metric.phrase}"
    if gap.low is None or gap.high is None:
        return (
            f"{said} was not found: difference {gap.value:.{digits}f} {unit} on one document, "
            "which gives no interval."
        )
    size = f"{_number(gap.value, digits)} {unit} "
    size += f"[{_number(gap.low, digits)}, {_number(gap.high, digits)}]"
    if gap.above_zero:
        return f"{said} by {size}."
    other = f"; {below} is above {above}" if gap.below_zero else ""
    return f"{said} was not found: difference {size}{other}."


def _number(value: float, digits: int) -> str:
    """The number with `digits` decimals, or with more where it would read as 0 and is not."""
    while value and digits < 6 and float(f"{value:.{digits}f}") == 0:
        digits += 1
    return f"{value:.{digits}f}"


def _row(cells: Cells, name: str) -> RowKey:
    found = [row for row in cells.rows if row.name == name]
    if not found:
        known = ", ".join(dict.fromkeys(row.name for row in cells.rows)) or "none"
        raise InputError(f"no row is named {name!r}; there are: {known}")
    if len(found) > 1:
        specs = ", ".join(row.spec for row in found)
        raise InputError(f"{name!r} names several rows ({specs}); give records of one of them")
    return found[0]


def _metric(key: str) -> Metric:
    if key not in METRICS:
        raise InputError(f"unknown metric {key!r}; expected one of {', '.join(METRICS)}")
    return METRICS[key]


def _accuracy_of(protocol: str) -> Metric:
    return next(m for m in METRICS.values() if m.protocol == protocol)

"""The measurements table, the one format behind every report: one row per measured sum.

A row has the identity of the model and data, the unit (document, sentence, image, batch), the place
(layer, head, bin of an axis), the statistic, and two numbers, `sum` and `of`. These are sums, never
rates: 7 correct of 10 tokens are sum = 7, of = 10. So any group of rows can be added up later
without the model. A loss is nats over tokens, a mean a sum over its count, and a scalar
(parameters, steps) a number over 1.

    identity    study, row, score, method, seed, protocol, length, train_length, split,
                data, weights, settings (digests), and `factor.*`: what else a study varies
    axes        unit, layer, head, axis, bin, bin_end
    measured    statistic, sum, of

`row` is the trained row of a table, `score` its complete specification, `method` the inference-time
method ("" for the unmodified model). A bin is half-open, bin ≤ x < bin_end; without an axis, `axis`
is "". Columns `factor.NAME` belong to a study (a window, a learning rate, a size): strings or
numbers, null where they do not apply.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import ArrayLike

from normattn.errors import InputError
from normattn.io import open_file, write_with

FILE = "measurements.parquet"
"""The name of the measurements table in a folder of results."""

DIGEST = "normattn.digest"
"""The key of the file's metadata with the digest of its other bytes."""
_UNSIGNED = b"sha256:" + 64 * b"0"
_SIGNED = re.compile(rb"sha256:[0-9a-f]{64}")
LARGEST, SMALLEST = 1e60, 1e-60
"""Bounds of `sum` and `of`, so that squares of their ratios are finite."""
FACTOR = "factor."
Types = dict[str, type[pl.DataType]]
IDENTITY: Types = {
    "study": pl.String,
    "row": pl.String,
    "score": pl.String,
    "method": pl.String,
    "seed": pl.Int64,
    "protocol": pl.String,
    "length": pl.Int64,
    "train_length": pl.Int64,
    "split": pl.String,
    "data": pl.String,
    "weights": pl.String,
    "settings": pl.String,
}
AXES: Types = {
    "unit": pl.String,
    "layer": pl.Int64,
    "head": pl.Int64,
    "axis": pl.String,
    "bin": pl.Float64,
    "bin_end": pl.Float64,
}
MEASURED: Types = {"statistic": pl.String, "sum": pl.Float64, "of": pl.Float64}
SCHEMA: Types = {**IDENTITY, **AXES, **MEASURED}
NULLABLE = ("layer", "head", "bin", "bin_end")
_TYPES = {str: pl.String, int: pl.Int64, float: pl.Float64, bool: pl.Boolean}

Factor = str | int | float | bool


@dataclass(frozen=True)
class Identity:
    """The identity of a measurement; `factors` has what else a study varies."""

    study: str
    row: str
    score: str
    seed: int
    protocol: str = ""
    length: int = 0
    train_length: int = 0
    method: str = ""
    split: str = "test"
    data: str = ""
    weights: str = ""
    settings: str = ""
    factors: Mapping[str, Factor] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name in messages: the row and its method."""
        return "-".join(filter(None, (self.row, self.method)))

    def columns(self) -> dict[str, Factor]:
        """The identity as columns of the table."""
        columns = {name: getattr(self, name) for name in IDENTITY}
        return {**columns, **{FACTOR + name: value for name, value in self.factors.items()}}


def empty() -> pl.DataFrame:
    """A measurements table without rows."""
    return pl.DataFrame(schema=SCHEMA)


def sums(
    statistic: str,
    units: Sequence[str],
    sum: ArrayLike,
    of: ArrayLike,
    *,
    axis: str = "",
    edges: Sequence[float | int] | None = None,
    layer: int | None = None,
    head: int | None = None,
) -> pl.DataFrame:
    """Rows of one statistic, without their identity, which `with_identity` adds.

    `sum` and `of` are (units,) without an axis and (units, bins) with one; `of` is broadcast to
    `sum`. `edges` are the ends of the bins (bins + 1,), or whole numbers (bins,). Rows of one unit
    are added up, such as windows of one document.
    """
    numerator, denominator = (
        array[:, None] if array.ndim == 1 else array
        for array in (np.asarray(sum, np.float64), np.asarray(of, np.float64))
    )
    count, values = numerator.shape[1], [float(edge) for edge in (() if edges is None else edges)]
    if not axis and (edges is not None or count != 1):
        raise InputError(f"{count} bins without an axis")
    if axis and (edges is None or len(values) not in (count, count + 1)):
        raise InputError(f"the axis {axis} has {count} bins; their edges do not match")
    ends = values[1:] if len(values) > count else [value + 1.0 for value in values]
    raw = pl.DataFrame(
        {
            "unit": np.repeat(np.asarray(units, dtype=object), count),
            "bin": (values[:count] if axis else [None]) * len(units),
            "bin_end": (ends if axis else [None]) * len(units),
            "sum": numerator.ravel(),
            "of": np.broadcast_to(denominator, numerator.shape).ravel(),
        },
        schema={name: SCHEMA[name] for name in ("unit", "bin", "bin_end", "sum", "of")},
    )
    added = raw.group_by("unit", "bin", "bin_end", maintain_order=True).sum()
    return added.with_columns(
        pl.lit(statistic).alias("statistic"),
        pl.lit(axis).alias("axis"),
        pl.lit(layer, dtype=pl.Int64).alias("layer"),
        pl.lit(head, dtype=pl.Int64).alias("head"),
    )


def scalar(statistic: str, value: float | int, unit: str = "") -> pl.DataFrame:
    """A row with one number of a training, such as its parameters or steps."""
    return sums(statistic, [unit], [value], [1.0])


def diverged(identity: Identity, step: int, where: str) -> pl.DataFrame:
    """The measurement that a training ended in NaN at a step, first seen in the module `where`."""
    row = sums("diverged", [where], [[1.0]], [[1.0]], axis="step", edges=[float(step)])
    return with_identity(identity, [row])


def with_identity(identity: Identity, parts: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """The rows of `parts` with their identity, as a checked measurements table."""
    rows = pl.concat(list(parts))
    columns = [
        pl.lit(value, dtype=IDENTITY.get(name) or _TYPES[type(value)]).alias(name)
        for name, value in identity.columns().items()
    ]
    return validate(rows.with_columns(columns), f"the measurements of {identity.row}")


def concat(frames: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """Concatenate measurements tables; missing factors are null."""
    nonempty = [frame for frame in frames if frame.height]
    return pl.concat(nonempty, how="diagonal") if nonempty else empty()


def validate(frame: pl.DataFrame, source: str) -> pl.DataFrame:
    """The frame with its columns in order, or `InputError` naming `source` and the first fault."""
    missing = [name for name in SCHEMA if name not in frame.columns]
    if missing:
        raise InputError(f"{source} lacks the column {missing[0]}")
    factors = [name for name in frame.columns if name not in SCHEMA]
    for name in factors:
        if not name.startswith(FACTOR):
            raise InputError(f"{source} has an unknown column {name}")
        if frame.schema[name] not in _TYPES.values():
            raise InputError(f"{source}: {name} is of type {frame.schema[name]}")
    for name, kind in SCHEMA.items():
        if frame.schema[name] != kind:
            raise InputError(f"{source}: {name} is {frame.schema[name]}, expected {kind.__name__}")
        if name not in NULLABLE and frame[name].null_count():
            raise InputError(f"{source}: a row has no {name}")
    of = pl.col("of")
    in_range = (pl.col("sum").abs() <= LARGEST) & ((of == 0) | of.is_between(SMALLEST, LARGEST))
    if frame.filter(~in_range).height:
        raise InputError(f"{source}: a sum or a count is not finite or out of range")
    ordered = frame.select(*SCHEMA, *sorted(factors))
    keys = [name for name in ordered.columns if name not in ("sum", "of")]
    if ordered.select(keys).is_duplicated().any():
        raise InputError(f"{source} holds the same sum twice")
    return ordered


def sorted_rows(frame: pl.DataFrame) -> pl.DataFrame:
    """The rows in an order that depends on the content only, for equal bytes."""
    keys = [name for name in frame.columns if name not in ("sum", "of")]
    return frame.sort(keys, nulls_last=True)


def write(path: Path, frame: pl.DataFrame) -> None:
    """Write a measurements table as Parquet, atomically; equal tables give equal bytes."""
    table = sorted_rows(validate(frame, str(path)))
    metadata = {DIGEST: _UNSIGNED.decode()}

    def fill(file: Path) -> None:
        table.write_parquet(file, compression="zstd", statistics=False, metadata=metadata)
        content = file.read_bytes()
        file.write_bytes(content.replace(_UNSIGNED, _signature(content)))

    write_with(path, fill)


def read(path: Path) -> pl.DataFrame:
    """Read and check a measurements table; raises `InputError` for a missing or damaged file."""
    if not path.exists():
        raise InputError(f"{path} does not exist; it should hold the measurements")
    with open_file(path) as file:
        content = file.read()
    # The digest is checked before parsing, as the parser may crash on a damaged file.
    signatures = _SIGNED.findall(content)
    if len(signatures) != 1:
        raise InputError(f"{path} is not a measurements table: it holds no digest")
    if _signature(content.replace(signatures[0], _UNSIGNED)) != signatures[0]:
        raise InputError(f"{path} is damaged: its content does not match its digest")
    return validate(pl.read_parquet(content), str(path))


def _signature(unsigned: bytes) -> bytes:
    """The SHA-256 of a file in which the digest is replaced by zeros."""
    return b"sha256:" + hashlib.sha256(unsigned).hexdigest().encode()

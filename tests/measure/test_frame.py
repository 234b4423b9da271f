"""The frame: what it refuses, and that equal frames are equal bytes."""

from __future__ import annotations

import math
from pathlib import Path

import polars as pl
import pytest

from measure.make import counted
from normattn.errors import InputError
from normattn.lab.stats import concat, measurements, sums


def test_windows_of_one_document_are_added_up() -> None:
    rows = sums("loss", ["a", "b", "a"], [1.0, 2.0, 4.0], [1.0, 1.0, 3.0])
    found = {unit: (s, of) for unit, s, of in rows.select("unit", "sum", "of").rows()}
    assert found == {"a": (5.0, 4.0), "b": (2.0, 1.0)}


def test_a_bin_is_half_open_and_has_both_ends() -> None:
    rows = sums("x", ["a"], [[1.0, 2.0]], [[1.0, 1.0]], axis="position", edges=[0, 4, 8])
    assert rows.select("bin", "bin_end").rows() == [(0.0, 4.0), (4.0, 8.0)]
    rows = sums("x", ["a"], [[1.0, 2.0]], [[1.0, 1.0]], axis="layer", edges=[1, 2])
    assert rows.select("bin", "bin_end").rows() == [(1.0, 2.0), (2.0, 3.0)]
    with pytest.raises(InputError, match="edges do not match"):
        sums("x", ["a"], [[1.0, 2.0]], [[1.0, 1.0]], axis="position", edges=[0])
    with pytest.raises(InputError, match="without an axis"):
        sums("x", ["a"], [[1.0, 2.0]], [[1.0, 1.0]])


def _with(column: str, value: float) -> object:
    """The second row's number replaced."""
    second = pl.when(pl.int_range(pl.len()) == 1).then(pl.lit(value)).otherwise(pl.col(column))
    return lambda frame: frame.with_columns(second.alias(column))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.drop("seed"), "lacks the column seed"),
        (lambda f: f.with_columns(pl.lit(1).alias("colour")), "unknown column colour"),
        (lambda f: f.with_columns(pl.lit([1]).alias("factor.x")), "factor.x is of type"),
        (lambda f: f.with_columns(pl.col("seed").cast(pl.Int32)), "seed is Int32"),
        (lambda f: f.with_columns(pl.lit(None, pl.String).alias("row")), "no row"),
        (lambda f: pl.concat([f, f]), "twice"),
        *((_with("sum", value), "sum is") for value in (math.inf, math.nan, 1e308, -1e200)),
        *((_with("of", value), "of") for value in (math.inf, math.nan, 1e308, 5e-324, 1e-200)),
        (_with("of", -1.0), "negative"),
    ],
)
def test_what_is_refused(change: object, message: str) -> None:
    whole = counted("A", 0, [1, 2])
    with pytest.raises(InputError, match=message):
        measurements.validate(change(whole), "it")  # type: ignore[operator]


def test_equal_frames_are_equal_bytes_whatever_their_order(tmp_path: Path) -> None:
    whole = concat([counted("A", 0, [1, 2, 3]), counted("B", 1, [4, 5, 6], method="YaRN")])
    measurements.write(tmp_path / "a.parquet", whole)
    measurements.write(tmp_path / "b.parquet", whole.reverse())
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    assert measurements.read(tmp_path / "a.parquet").equals(measurements.sorted_rows(whole))


def test_every_flipped_byte_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    whole = counted("A", 0, [1, 2, 3])
    measurements.write(path, whole)
    good = path.read_bytes()
    refused = 0
    for place in range(0, len(good), 7):
        path.write_bytes(good[:place] + bytes([good[place] ^ 0x10]) + good[place + 1 :])
        try:
            assert measurements.read(path).equals(measurements.sorted_rows(whole))
        except InputError as error:
            named = "a.parquet" in str(error)
            refused += named
    assert refused > len(good) / 7 / 4


def test_cut_empty_and_foreign_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.parquet"
    with pytest.raises(InputError, match=r"m\.parquet does not exist"):
        measurements.read(path)
    measurements.write(path, counted("A", 0, [1, 2]))
    good = path.read_bytes()
    for content in (b"", good[:-20], good[: len(good) // 2], b"PAR1" + b"x" * 50):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"m\.parquet is (not a measurements table|damaged)"):
            measurements.read(path)


def test_factors_are_null_where_they_do_not_apply() -> None:
    plain = counted("A", 0, [1])
    varied = counted("B", 0, [1], factors={"rate": 2.0, "step": 3})
    whole = concat([plain, varied])
    assert whole.filter(row="A")["factor.rate"].to_list() == [None]
    assert whole.filter(row="B")["factor.step"].to_list() == [3]

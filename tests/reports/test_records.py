from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from normattn.errors import InputError
from normattn.reports import parse_record, read_record, record_text
from normattn.reports.cells import Cells, gather

from .make import make_record


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    record = make_record([[3, 1], [4, 0]], loss=[[0.1, 1 / 3], [1e-17, 2.5]])
    path = tmp_path / "record.json"
    path.write_text(record_text(record))
    assert read_record(path) == record
    assert record_text(read_record(path)) == record_text(record)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"correct": [[3,1]', '"correct": [[4,1]'),
        lambda text: "[]",
        lambda text: "{}",
        lambda text: text.replace('"format": 1', '"format": 99'),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "record.json"
    text = record_text(make_record([[3, 1], [4, 0]]))
    assert damage(text) != text
    path.write_text(damage(text))
    with pytest.raises(InputError, match=r"record\.json is damaged"):
        read_record(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.json does not exist"):
        read_record(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"correct": [[17, 0], [0, 0]]}, "correct is not between 0"),
        ({"correct": [[1, 0]]}, "correct is not of 2 windows by 2 bins"),
        ({"edges": [0, 16, 31]}, "do not end at the length"),
        ({"edges": [0, 0, 32]}, "do not increase"),
        ({"seen_tokens": [[1, 1], [1, 1]]}, "belong together"),
        ({"protocol": "guess"}, "protocol"),
        ({"colour": "red"}, "colour"),
        ({"format": 2}, "format 1"),
        ({"loss": [[float("inf"), 0], [0, 0]]}, "loss"),
    ],
)
def test_inconsistent_content_is_refused(change: dict[str, Any], said: str) -> None:
    fields = json.loads(record_text(make_record([[3, 1], [4, 0]])))
    del fields["digest"]
    with pytest.raises(InputError, match=said):
        parse_record(fields | change, "here")


def test_a_documents_windows_are_added_up_and_documents_sorted() -> None:
    cell = gather([make_record([[1, 2], [3, 4], [5, 6]], documents=("b", "a", "b"))])
    assert cell.documents == ("a", "b")
    np.testing.assert_array_equal(cell.sums["correct"], [[[3, 4], [6, 8]]])
    np.testing.assert_array_equal(cell.sums["tokens"], [[[16, 16], [32, 32]]])


def test_two_runs_of_one_seed_are_refused_and_one_record_twice_is_one() -> None:
    record = make_record([[1, 2], [3, 4]])
    assert gather([record, record]).seeds == (0,)
    with pytest.raises(InputError, match="evaluated twice with different weights"):
        gather([record, make_record([[1, 2], [3, 4]], key="other")])


def test_seeds_on_different_sets_are_refused_when_pooled() -> None:
    other = make_record([[1, 2], [3, 4]], seed=1, data="another set")
    with pytest.raises(InputError, match="different non_repeated sets"):
        gather([make_record([[1, 2], [3, 4]]), other])


def test_the_set_that_most_records_share_counts() -> None:
    shared = [make_record([[1, 2], [3, 4]], variant=name) for name in ("Baseline", "KNA")]
    older = make_record([[1, 2]], data="older", key="older")
    cells = Cells([older, *shared])
    assert cells.left_out == 1
    found = [cells.get(row, "non_repeated") for row in cells.rows]
    assert [cell.documents if cell else None for cell in found] == [("d0", "d1")] * 2

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from polars.testing import assert_frame_equal

from normattn.errors import InputError
from normattn.lab.evaluation.language_model import evaluate_cell
from normattn.lab.stats import MeasurementStore, measurements

from .make import Counter, counting, info, make_set


def test_an_evaluation_is_done_once(tmp_path: Path) -> None:
    store, scorer = MeasurementStore(tmp_path / "evaluations"), Counter()
    chosen = make_set([counting(), counting(broken_at=2)])
    first = evaluate_cell(scorer, chosen, info(), store=store)
    assert len(scorer.shapes) == 1
    again = evaluate_cell(scorer, chosen, info(), store=MeasurementStore(store.folder))
    assert len(scorer.shapes) == 1
    assert_frame_equal(again, measurements.sorted_rows(first), check_exact=True)
    assert_frame_equal(store.frame(), again, check_exact=True)
    assert len(store) == 1


CHANGES: list[dict[str, Any]] = [
    *({"weights": "v"}, {"score": "KNA@9"}, {"settings": "bf16"}),
    *({"split": "validation"}, {"seed": 1}, {"factors": {"window": 4}}),
]


def test_whatever_decides_the_outcome_is_in_the_key(tmp_path: Path) -> None:
    store, scorer = MeasurementStore(tmp_path), Counter()
    chosen = make_set([counting()])
    for change in ({}, *CHANGES):
        evaluate_cell(scorer, chosen, info(**change), store=store)
    assert len(scorer.shapes) == len(store) == 1 + len(CHANGES)


def test_a_damaged_file_is_named_and_redone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, scorer = MeasurementStore(tmp_path), Counter()
    chosen = make_set([counting()])
    first = evaluate_cell(scorer, chosen, info(), store=store)
    [path] = tmp_path.iterdir()
    whole = path.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    for damaged in (whole[:100], flipped, b""):
        assert damaged != whole
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=path.name):
            store.frame()
        redone = evaluate_cell(scorer, chosen, info(), store=store)
        assert_frame_equal(redone, first, check_exact=True)
        said = capsys.readouterr().err
        assert f"{path} is " in said
        assert "damaged" in said or "not a measurements table" in said
        assert "repeated" in said
        assert path.read_bytes() == whole
    assert len(scorer.shapes) == 4
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_an_unwritable_store_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        evaluate_cell(
            Counter(), make_set([counting()]), info(), store=MeasurementStore(tmp_path / "file")
        )

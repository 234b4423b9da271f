from __future__ import annotations

from pathlib import Path

import pytest

from normattn.errors import InputError
from normattn.evaluation import EvaluationStore, evaluate_cell

from .make import Counter, counting, info, make_set


def test_an_evaluation_is_done_once(tmp_path: Path) -> None:
    store, scorer = EvaluationStore(tmp_path / "evaluations"), Counter()
    chosen = make_set([counting(), counting(broken_at=2)])
    first = evaluate_cell(scorer, chosen, info(), store=store)
    assert len(scorer.shapes) == 1
    again = evaluate_cell(scorer, chosen, info(), store=EvaluationStore(store.folder))
    assert len(scorer.shapes) == 1
    assert again == first
    assert store.records() == [first]


@pytest.mark.parametrize("change", [{"weights": "v"}, {"spec": "KNA@9"}, {"precision": "bf16"}])
def test_whatever_decides_the_outcome_is_in_the_key(tmp_path: Path, change: dict[str, str]) -> None:
    store, scorer = EvaluationStore(tmp_path), Counter()
    chosen = make_set([counting()])
    evaluate_cell(scorer, chosen, info(), store=store)
    evaluate_cell(scorer, chosen, info(**change), store=store)
    assert len(scorer.shapes) == 2
    assert len(store.records()) == 2


def test_other_data_is_another_evaluation(tmp_path: Path) -> None:
    store, scorer = EvaluationStore(tmp_path), Counter()
    for chosen in (
        make_set([counting()]),
        make_set([counting(broken_at=1)]),
        make_set([counting()], documents=["other"]),
        make_set([counting()], start=4),
        make_set([counting()], train_length=4),
        make_set([counting()], segments=[3]),
    ):
        evaluate_cell(scorer, chosen, info(), store=store)
    assert len(scorer.shapes) == len(store.records()) == 6


def test_a_damaged_record_is_named_and_redone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, scorer = EvaluationStore(tmp_path), Counter()
    chosen = make_set([counting()])
    first = evaluate_cell(scorer, chosen, info(), store=store)
    path = store.path(first.key)
    whole = path.read_text()
    for damaged in (whole[:100], whole.replace('"run": "run"', '"run": "ran"'), ""):
        assert damaged != whole
        path.write_text(damaged)
        with pytest.raises(InputError, match=first.key):
            store.records()
        assert evaluate_cell(scorer, chosen, info(), store=store) == first
        assert f"{path} is damaged" in capsys.readouterr().err
        assert path.read_text() == whole
    assert len(scorer.shapes) == 4
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_record_under_a_foreign_name_is_not_used(tmp_path: Path) -> None:
    store, scorer = EvaluationStore(tmp_path), Counter()
    first = evaluate_cell(scorer, make_set([counting()]), info(), store=store)
    store.path(first.key).rename(store.path("other"))
    assert store.get("other") is None


def test_an_unwritable_store_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        evaluate_cell(
            Counter(), make_set([counting()]), info(), store=EvaluationStore(tmp_path / "file")
        )

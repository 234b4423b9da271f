"""Retrieval records → shares, pages and heat maps."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from normattn.errors import InputError
from normattn.reports import Bootstrap, build
from normattn.reports.records import parse_any, parse_record, record_text
from normattn.reports.retrieval import retrieval_cells
from normattn.reports.retrieval_record import RetrievalRecord

from .make import make_record

L = 8
DEPTHS = (0.0, 0.5, 1.0)


def make(
    correct: Sequence[Sequence[int]],
    *,
    variant: str = "KNA",
    method: str = "",
    seed: int = 0,
    task: str = "passkey",
    length: int = 16,
    **changes: Any,
) -> RetrievalRecord:
    """A record of answers of 4 tokens each, samples by the three depths."""
    name = "-".join(filter(None, (variant, method)))
    fields: dict[str, Any] = {
        "key": f"{name}-{seed}-{task}-{length}",
        "run": f"{variant}-{seed}",
        "seed": seed,
        "variant": variant,
        "method": method,
        "name": name,
        "spec": f"{name}@{L}",
        "protocol": "retrieval",
        "task": task,
        "length": length,
        "train_length": L,
        "weights": f"{variant}-{seed}",
        "data": f"{task}-{length}-{len(correct)}",
        "documents": tuple(f"d{i}" for i in range(len(correct))),
        "depths": DEPTHS,
        "tokens": [[4] * 3 for _ in correct],
        "correct": correct,
        "loss": [[0.5] * 3 for _ in correct],
    }
    return RetrievalRecord.model_validate(fields | changes)


def everything() -> list[RetrievalRecord]:
    """Two methods, three tasks, two lengths, ten samples."""
    generator = np.random.default_rng(0)
    return [
        make(generator.integers(2, 5, (10, 3)).tolist(), method=method, task=task, length=length)
        for method in ("", "YaRN")
        for task in ("passkey", "multi_key", "variable_tracking")
        for length in (8, 32)
    ]


def test_records_come_back_from_their_text() -> None:
    record = make([[4, 3, 0], [4, 4, 1]])
    assert parse_any(json.loads(record_text(record))) == record
    np.testing.assert_array_equal(record.counts("exact"), [[1, 0, 0], [1, 1, 0]])
    np.testing.assert_array_equal(record.counts("answers"), np.ones((2, 3)))
    np.testing.assert_array_equal(record.counts("correct"), [[4, 3, 0], [4, 4, 1]])
    with pytest.raises(InputError, match="no bins of positions"):
        parse_record(json.loads(record_text(record)))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"correct": [[5, 0, 0], [0, 0, 0]]}, "correct is not between"),
        ({"correct": [[0, 0, 0]]}, "correct is not of 2 samples by 3 depths"),
        ({"tokens": [[0, 4, 4], [4, 4, 4]]}, "an answer has no token"),
        ({"depths": (0.0, 0.5, 0.5)}, "depths do not increase"),
        ({"depths": (0.0, 0.5, 1.5)}, "not between 0 and 1"),
        ({"task": "needle"}, "task: Input should be"),
        ({"edges": (0, 4)}, "edges: Extra inputs"),
        ({"format": 2}, "not an evaluation record of format 1"),
    ],
)
def test_records_that_make_no_sense_are_refused(changes: dict[str, Any], match: str) -> None:
    fields = make([[4, 3, 0], [4, 4, 1]]).model_dump(mode="json")
    with pytest.raises(InputError, match=match):
        parse_any(fields | changes, "the record")


def test_shares_are_counted_by_hand() -> None:
    (cell,) = retrieval_cells([make([[4, 3, 0], [4, 4, 1], [4, 0, 4], [0, 0, 0]])])
    assert [share.value for share in cell.exact] == [75, 25, 25]
    assert cell.overall.value == pytest.approx(100 * 5 / 12)
    assert [share.value for share in cell.tokens] == [75, 43.75, 31.25]
    assert cell.token.value == 50
    assert (cell.samples, cell.seeds) == (4, 1)
    for share in (*cell.exact, cell.overall, *cell.tokens, cell.token):
        assert share.low is not None
        assert share.high is not None
        assert 0 <= share.low <= share.value <= share.high <= 100


def test_intervals_resample_whole_samples() -> None:
    # Every sample is right at exactly one depth of three: whichever are drawn, a third is right.
    correct = [[4 * (i % 3 == d) for d in range(3)] for i in range(12)]
    (cell,) = retrieval_cells([make(correct)])
    assert cell.overall.value == cell.overall.low == cell.overall.high == pytest.approx(100 / 3)
    drawn = np.random.default_rng(0).multinomial(12, np.full(12, 1 / 12), size=4000)
    share = drawn @ (np.arange(12) % 3 == 0) / 12 * 100
    ends = np.percentile(share, [2.5, 97.5])
    assert cell.exact[0].low is not None
    assert cell.exact[0].high is not None
    assert abs(cell.exact[0].low - ends[0]) < 5
    assert abs(cell.exact[0].high - ends[1]) < 5


def test_seeds_are_pooled_and_a_single_sample_has_no_interval() -> None:
    (cell,) = retrieval_cells([make([[4, 0, 4]]), make([[4, 4, 0]], seed=1)])
    assert [share.value for share in cell.exact] == [100, 50, 50]
    assert cell.seeds == 2
    assert cell.exact[0].low is None
    assert str(cell.overall) == "66.7 [no interval]"
    with pytest.raises(InputError, match="evaluated twice with different weights"):
        retrieval_cells([make([[4, 0, 4]]), make([[4, 4, 0]], key="other")])


def test_rows_are_compared_on_the_set_that_most_of_them_share() -> None:
    records = [make([[4, 0, 4]], method=method, data="common") for method in ("", "NTK")]
    cells = retrieval_cells([*records, make([[4, 4, 4]], data="other", key="k")])
    assert [cell.row.name for cell in cells] == ["KNA", "KNA-NTK"]
    assert [cell.overall.value for cell in cells] == pytest.approx([200 / 3, 200 / 3])


def test_a_report_of_retrieval_alone(tmp_path: Path) -> None:
    paths = build(everything(), tmp_path / "a")
    assert [path.name for path in paths.more] == ["retrieval.md", "retrieval.csv"]
    assert "[retrieval.md](retrieval.md)" in paths.markdown.read_text()
    text = paths.more[0].read_text()
    assert "10 samples at 3 depths, seeds: 1. Fewer than 20 samples" in text
    for expected in ("## Passkey", "## Multi-key", "## Variable tracking", "32 (4×)", "KNA-YaRN"):
        assert expected in text
    with paths.more[1].open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 3 * 2 * len(DEPTHS)
    assert all(float(row["low"]) <= float(row["exact"]) <= float(row["high"]) for row in rows)
    tasks = ("passkey", "multi_key", "variable_tracking")
    expected_figures = {
        f"retrieval_{task}_KNA{kind}.{end}"
        for task in tasks
        for kind in ("", "_tokens")
        for end in ("png", "svg")
    }
    assert {path.name for path in paths.figures} == expected_figures
    again = build(everything()[::-1], tmp_path / "b")
    for first, second in zip(
        (*paths.figures, *paths.more), (*again.figures, *again.more), strict=True
    ):
        assert first.read_bytes() == second.read_bytes()


def test_the_table_stays_what_it_was_beside_retrieval(tmp_path: Path) -> None:
    table = [make_record([[1, 2], [2, 2]]), make_record([[3, 2], [2, 2]], method="YaRN")]
    quick = Bootstrap(resamples=50)
    alone = build(table, tmp_path / "a", figures=False, bootstrap=quick)
    both = build([*everything(), *table], tmp_path / "b", figures=False, bootstrap=quick)
    assert alone.csv.read_bytes() == both.csv.read_bytes()
    assert alone.json.read_bytes() == both.json.read_bytes()
    assert both.markdown.read_text().startswith(alone.markdown.read_text().rstrip("\n"))
    assert not alone.more


def test_a_length_that_one_method_lacks_is_left_blank(tmp_path: Path) -> None:
    records = [make([[4, 0, 4]] * 2, length=length) for length in (8, 32)]
    paths = build([*records, make([[4, 0, 4]] * 2, method="NTK")], tmp_path)
    assert "–" in paths.more[0].read_text()
    assert len(paths.figures) == 4

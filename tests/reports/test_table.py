from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest
from normattn.reports.build import table_json

from normattn.errors import InputError
from normattn.reports import Divergence, build, table_rows

from .make import make_record, random_records

METRIC_FIELDS = {"value", "low", "high", "documents", "tokens", "seeds"}
METRICS = (
    *("train", "repeated", "repeated_seen", "non_repeated", "last_segment"),
    *("train_loss", "repeated_loss", "non_repeated_loss", "last_segment_loss", "tax"),
)


def test_rows_stand_in_the_order_of_the_literature() -> None:
    records = random_records(("CosA", "QNA", "Baseline-logn", "Baseline"), ("ReRoPE", "", "NTK"))
    names = [row.name for row in table_rows(records)]
    assert names[:4] == ["Baseline", "Baseline-NTK", "Baseline-ReRoPE", "Baseline-logn"]
    assert names[6:8] == ["QNA", "QNA-NTK"]
    assert len(names) == 12


def test_json_rows_have_every_metric_with_its_counts() -> None:
    rows = json.loads(table_json(table_rows(random_records())))
    assert [row["name"] for row in rows][:3] == ["Baseline", "Baseline-YaRN", "KNA"]
    for row in rows:
        assert row["name"] == "-".join(filter(None, (row["variant"], row["method"])))
        assert row["spec"] == f"{row['name']}@8"
        assert row["train_length"] == 8
        assert "diverged" not in row
        for key in METRICS:
            if key == "tax" and not row["method"]:
                assert row[key] is None
                continue
            assert set(row[key]) == METRIC_FIELDS
            assert row[key]["low"] <= row[key]["value"] <= row[key]["high"]
            assert (row[key]["documents"], row[key]["seeds"]) == (6, 2)
        assert row["non_repeated"]["tokens"] == 6 * 32
        assert row["last_segment"]["tokens"] == 6 * 8
        assert row["train_loss"]["value"] == 0.5


def test_values_are_the_plain_ratios() -> None:
    records = [
        make_record([[1, 2], [3, 4]], seed=0),
        make_record([[5, 6], [7, 8]], seed=1),
    ]
    row = table_rows(records)[0].as_json()
    assert row["non_repeated"]["value"] == pytest.approx(100 * 36 / (2 * 2 * 32))


def test_the_train_column_is_the_unmodified_models_and_the_tax_is_apart() -> None:
    plain = make_record([[4], [6]], protocol="train_length", length=8)
    method = make_record([[3], [6]], protocol="train_length", length=8, method="YaRN")
    rows = {row.name: row.as_json() for row in table_rows([method, plain])}
    assert rows["Baseline-YaRN"]["train"] == rows["Baseline"]["train"]
    assert rows["Baseline"]["train"]["value"] == 62.5
    assert rows["Baseline-YaRN"]["tax"]["value"] == pytest.approx(-100 / 16)
    assert rows["Baseline"]["tax"] is None


def test_the_longest_shared_length_fills_a_column() -> None:
    records = [
        make_record([[1], [2]], length=length, variant=variant)
        for variant, lengths in (("Baseline", (16, 32, 64)), ("KNA", (16, 32)))
        for length in lengths
    ]
    assert [row.lengths["non_repeated"] for row in table_rows(records)] == [32, 32]


def test_rows_of_one_name_are_told_apart() -> None:
    records = [
        make_record([[1], [2]], method="YaRN", spec=f"Baseline-YaRN(factor={f})@8", key=str(f))
        for f in (4, 8)
    ]
    names = [row.name for row in table_rows(records)]
    assert names == ["Baseline-YaRN(factor=4)@8", "Baseline-YaRN(factor=8)@8"]
    assert [row.as_json()["name"] for row in table_rows(records)] == ["Baseline-YaRN"] * 2


def test_a_diverged_run_is_a_result(tmp_path: Path) -> None:
    diverged: list[Divergence | dict[str, Any]] = [
        Divergence("QNA", 120, "blocks.1.attention"),
        {"variant": "KNA", "seed": 5, "step": 40, "where": "blocks.0", "train_length": 8},
    ]
    paths = build(random_records(), tmp_path, diverged, figures=False)
    rows = {row["name"]: row for row in json.loads(paths.json.read_text())}
    for name in ("QNA", "QNA-YaRN"):
        assert rows[name]["diverged"]["step"] == 120
        assert rows[name]["diverged"]["where"] == "blocks.1.attention"
        assert rows[name]["non_repeated"] is None
    assert rows["KNA-YaRN"]["diverged_seeds"] == [5]
    assert rows["KNA-YaRN"]["non_repeated"]["value"] > 0
    text = paths.markdown.read_text()
    assert text.count("| diverged at step 120") == 2
    assert "QNA, seed 0: diverged at step 120" in text
    assert "KNA, seed 5: diverged at step 40" in text
    assert "made of the other seeds" in text
    with pytest.raises(InputError, match="a diverged run is described by"):
        table_rows([], [{"variant": "KNA", "when": 3}])


def test_equal_records_give_equal_bytes_in_any_order(tmp_path: Path) -> None:
    records = random_records()
    first = build(records, tmp_path / "a")
    shuffled = [json.loads(record.model_dump_json()) for record in records]
    random.Random(1).shuffle(shuffled)
    second = build(shuffled, tmp_path / "b")
    for path in sorted((tmp_path / "a").rglob("*.*")):
        other = tmp_path / "b" / path.relative_to(tmp_path / "a")
        assert path.read_bytes() == other.read_bytes(), path.name
    assert len(first.figures) == len(second.figures) == 8
    assert len(list((tmp_path / "a").rglob("*.*"))) == 13


def test_markdown_is_aligned_and_says_what_stands_behind(tmp_path: Path) -> None:
    text = build(random_records(), tmp_path, figures=False).markdown.read_text()
    blocks = [block for block in text.split("\n\n") if block.startswith("|")]
    for block in blocks:
        assert len({len(line) for line in block.splitlines()}) == 1
    assert "non-repeated (32)" in text
    assert "Seeds: Baseline, KNA, KNA-logn: seeds 0, 1." in text
    assert "Fewer than 20 documents: these intervals are too narrow to rely on." in text
    many = build(random_records(documents=20), tmp_path, figures=False).markdown.read_text()
    assert "Fewer than" not in many
    assert "KNA above Baseline on non-repeated text by" in text
    assert "another setting, not a target" in text
    assert "47.69" in text  # the source's KNA, as is, non-repeated


def test_csv_agrees_with_json(tmp_path: Path) -> None:
    paths = build(random_records(), tmp_path, figures=False)
    lines = list(csv.DictReader(paths.csv.open()))
    for line, row in zip(lines, json.loads(paths.json.read_text()), strict=True):
        assert line["name"] == row["name"]
        for key in METRICS:
            for field in METRIC_FIELDS:
                text = line[key if field == "value" else f"{key}_{field}"]
                value = "" if row[key] is None else str(row[key][field])
                assert text == value


def test_curves_hold_their_bins(tmp_path: Path) -> None:
    paths = build(random_records(methods=("",)), tmp_path, figures=False)
    lines = list(csv.DictReader(paths.by_position.open()))
    mine = [x for x in lines if x["name"] == "KNA" and x["protocol"] == "repeated"]
    assert [(x["from"], x["to"]) for x in mine[:2]] == [("1", "2"), ("3", "4")]
    assert len(mine) == 16
    lengths = list(csv.DictReader(paths.by_length.open()))
    assert [x["to"] for x in lengths if x["name"] == "KNA"] == ["8", "32"]


def test_nothing_to_report_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to report"):
        build([], tmp_path / "out")
    assert not (tmp_path / "out").exists()

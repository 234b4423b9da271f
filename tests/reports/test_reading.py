"""Records by position → curves of accuracy and loss, the page in octaves, the figure."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path

import numpy as np
import pytest

from normattn.reports import Bootstrap, Record, build
from normattn.reports.cells import Cells
from normattn.reports.figures.reading import method_style
from normattn.reports.reading import readings

from .make import make_record

EDGES = (0, 2, 4, 6, 8, 10, 11, 13, 16, 19, 23, 27, 32)
METHODS = ("", "NTK", "YaRN", "ReRoPE", "logn†", "logn†-NTK", "logn†-YaRN", "logn†-ReRoPE")


def read(method: str = "", variant: str = "KNA", seed: int = 0, documents: int = 5) -> Record:
    """A reading of 32 tokens at a training length of 8."""
    generator = np.random.default_rng([len(method), seed])
    widths = np.diff(EDGES)
    correct = generator.binomial(widths, 0.4, (documents, len(widths)))
    return make_record(
        correct.tolist(),
        tokens=[widths.tolist()] * documents,
        protocol="by_position",
        method=method,
        variant=variant,
        seed=seed,
        edges=EDGES,
        loss=(generator.random((documents, len(widths))) * widths).tolist(),
    )


def test_curves_are_ratios_of_sums_over_documents() -> None:
    record = read()
    (found,) = readings(Cells([record]), Bootstrap())
    tokens = record.counts("tokens").sum(axis=0)
    accuracy = 100 * record.counts("correct").sum(axis=0) / tokens
    assert [p.value for p in found.accuracy] == pytest.approx(list(accuracy))
    assert [p.value for p in found.loss] == pytest.approx(
        list(record.counts("loss").sum(axis=0) / tokens)
    )
    assert [(p.first - 1, p.last) for p in found.loss] == list(itertools.pairwise(EDGES))
    for point in (*found.accuracy, *found.loss):
        assert point.low is not None
        assert point.high is not None
        assert point.low <= point.value <= point.high
    assert (found.documents, found.tokens, found.seeds) == (5, 160, 1)


def test_octaves_add_bins_up() -> None:
    record = read()
    (found,) = readings(Cells([record]), Bootstrap(), octaves=True)
    assert [(p.first, p.last) for p in found.accuracy] == [(1, 8), (9, 16), (17, 32)]
    correct = record.counts("correct")
    expected = [correct[:, :4].sum() / 40, correct[:, 4:8].sum() / 40, correct[:, 8:].sum() / 80]
    assert [p.value for p in found.accuracy] == pytest.approx([100 * e for e in expected])


def test_one_document_has_no_interval() -> None:
    (found,) = readings(Cells([read(documents=1)]), Bootstrap())
    assert all(point.low is None and point.high is None for point in found.accuracy)


def test_every_method_has_its_own_look() -> None:
    looks = [method_style(method, METHODS) for method in METHODS]
    assert len({(look["color"], look["linestyle"]) for look in looks}) == len(METHODS)
    assert looks[0]["color"] == looks[4]["color"] == "#000000"
    assert looks[1]["color"] == looks[5]["color"]
    assert looks[5]["markerfacecolor"] == "white"


def test_a_report_of_reading_alone(tmp_path: Path) -> None:
    records = [read(method, variant) for method in METHODS for variant in ("KNA", "QK(gain=1)")]
    paths = build(records, tmp_path / "a")
    assert [path.name for path in paths.more] == ["reading.md", "reading.csv"]
    text = paths.more[0].read_text()
    assert "17 to 32" in text
    assert "KNA-logn†-YaRN" in text
    assert "## Loss" in text
    assert "Behind each row: 5 documents, 160 tokens, seeds: 1. Fewer than 20 documents" in text
    with paths.more[1].open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * len(METHODS) * (len(EDGES) - 1)
    assert {path.name for path in paths.figures} == {
        f"reading_by_position_{variant}.{end}"
        for variant in ("KNA", "QK_gain_1_")
        for end in ("png", "svg")
    }
    again = build(records[::-1], tmp_path / "b")
    for first, second in zip(paths.figures, again.figures, strict=True):
        assert first.read_bytes() == second.read_bytes()


def test_a_single_document_and_the_training_length_alone_can_be_drawn(tmp_path: Path) -> None:
    short = make_record(
        [[1, 2]], tokens=[[4, 4]], protocol="by_position", length=8, edges=(0, 4, 8)
    )
    assert len(build([short], tmp_path).figures) == 2


def test_two_lengths_and_two_factors_of_one_variant_are_told_apart(tmp_path: Path) -> None:
    one = read("YaRN")
    two = one.model_copy(update={"spec": "KNA-YaRN(factor=2)@8", "key": "other"})
    paths = build([read(), one, two], tmp_path / "factors", figures=False)
    assert "KNA-YaRN(factor=2)@8" in paths.more[0].read_text()
    longer = read().model_copy(update={"train_length": 16, "spec": "KNA@16", "data": "longer"})
    drawn = {path.stem for path in build([read(), longer], tmp_path / "lengths").figures}
    assert drawn == {"reading_by_position_KNA_8", "reading_by_position_KNA_16"}

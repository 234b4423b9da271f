from __future__ import annotations

import itertools
import json
import re
import struct
from pathlib import Path

import pytest

from normattn.errors import InputError
from normattn.reports import Bootstrap, build
from normattn.reports.figures.style import line_style, pages, spread, variant_pages
from normattn.reports.history import draw_history, read_losses

from .make import make_record, random_records

_STEMS = (
    "accuracy_by_position_non_repeated",
    "accuracy_by_position_repeated",
    "accuracy_by_context_length",
    "table_heat_map",
)
VARIANTS = ("Baseline", "Baseline-logn", "QNA", "QNA-logn", "KNA", "KNA-logn", "CosA", "CosA-logn")


def test_pngs_have_150_dots_per_inch_and_no_text_chunks(tmp_path: Path) -> None:
    for path in build(random_records(), tmp_path).figures:
        content = path.read_bytes()
        if path.suffix == ".png":
            place = content.index(b"pHYs")
            assert struct.unpack(">II", content[place + 4 : place + 12]) == (5906, 5906)
            assert b"tEXt" not in content
        else:
            assert b"<dc:date>" not in content
            assert not re.search(rb"[Mm]atplotlib v", content)


def test_every_variant_has_its_own_look() -> None:
    names = (*VARIANTS, "QKRMSNorm", "QKRMSNorm-logn", "QKLayerNorm")
    looks = {(s["color"], s["linestyle"]) for s in (line_style(name, names) for name in names)}
    assert len(looks) == len(names)


def test_labels_keep_order_and_distance() -> None:
    placed = spread([5.0, 1.0, 1.0, 1.1, 9.9], gap=1.0, low=0.0, high=10.0)
    order = sorted(range(5), key=lambda i: placed[i])
    assert order == [1, 2, 3, 0, 4]
    heights = sorted(placed)
    assert all(b - a > 0.999 for a, b in itertools.pairwise(heights))
    assert heights[0] >= 0
    assert heights[-1] <= 10
    assert placed[0] == 5.0
    crowded = spread([1.0] * 30, gap=1.0, low=0.0, high=10.0)
    assert min(crowded) == pytest.approx(0)
    assert max(crowded) == pytest.approx(10)


def test_a_64_times_longer_text_and_a_single_document_can_be_drawn(tmp_path: Path) -> None:
    edges = (0, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    widths = [b - a for a, b in itertools.pairwise(edges)]
    record = make_record(
        [[1] * 9], tokens=[widths], length=512, edges=edges, loss=[[1.0] * 9], variant="KNA"
    )
    assert len(build([record], tmp_path).figures) == 4


def test_history_is_drawn_from_unfinished_runs_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": s, "loss": 5.0 / s, "extra": 1}) for s in range(1, 50)]
    path.write_text("\n".join(lines) + '\n{"step": 50, "lo')
    steps, losses = read_losses(path)
    assert list(steps) == list(range(1, 50))
    assert losses[4] == 1.0
    first = draw_history({"KNA": [path, path], "Mine": [path]}, tmp_path / "a")
    second = draw_history({"Mine": [path], "KNA": [path, path]}, tmp_path / "b")
    assert [p.name for p in first] == ["training_loss.png", "training_loss.svg"]
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


@pytest.mark.parametrize(
    ("text", "said"),
    [("oops\n{}\n", "line 1 is not"), ("", "holds no loss"), ('{"step": 1}\n', "holds no loss")],
)
def test_damaged_history_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=rf"metrics\.jsonl.*{said}"):
        read_losses(path)


def test_no_history_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no metrics file"):
        draw_history({"KNA": []}, tmp_path)


def test_many_variants_are_drawn_on_several_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("normattn.reports.figures.style._VARIANTS", 2)
    monkeypatch.setattr("normattn.reports.figures.heat_map._ROWS", 5)
    records = random_records(seeds=(0,), documents=2)  # three variants, two methods
    quick = Bootstrap(resamples=10)
    drawn = {path.stem for path in build(records, tmp_path, bootstrap=quick).figures}
    expected = {f"{stem}{end}" for stem in _STEMS for end in ("", "_2")}
    assert drawn == expected


def test_every_page_of_variants_shows_the_baseline() -> None:
    names = ["Baseline", *(f"V{i}" for i in range(20))]
    found = variant_pages([*names, "V3", "Baseline"])
    assert [len(page) for page in found] == [8, 8, 7]
    assert all(page[0] == "Baseline" for page in found)
    assert sorted({name for page in found for name in page}) == sorted(names)
    assert variant_pages(["KNA", "QNA"]) == [["KNA", "QNA"]]
    assert [len(page) for page in variant_pages(names[1:])] == [8, 8, 4]
    looks = [line_style(name, found[1]) for name in found[1]]
    assert len({(look["color"], look["marker"]) for look in looks}) == 8


def test_pages_keep_groups_whole() -> None:
    assert pages(list("aaabbccccd"), 5) == [["a", "b"], ["c", "d"]]
    assert pages(list("aaa"), 2) == [["a"]]
    assert pages([], 2) == []

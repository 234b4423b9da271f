"""What `normattn extend` advises and shows, from a frame whose losses are known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from normattn.errors import InputError
from normattn.lab.report.page import context
from normattn.lab.report.tables import FilledTable
from normattn.lab.report.view import View
from normattn.lab.runs.directory import FORMAT
from normattn.lab.stats import Identity, concat, measurements, sums, with_identity
from normattn.lab.studies import extend
from normattn.lab.studies.extend import LAST, LEAST_GAIN, LOSS, TRAIN, Advice, advise, complete
from studies.conftest import Command

L, TOKENS = 8, 8
NAMES = {"": "unmodified", "PI": "PI", "YaRN": "YaRN(factor=4)"}
# Windows differ a little by method: a difference that is the same in all has no interval.
APART = {"": 0.0, "PI": 1e-4, "YaRN": -1e-4}
Losses = dict[str, dict[int, float]]


def _identity(method: str, length: int, protocol: str) -> Identity:
    kept = (0, protocol, length, L, method)
    return Identity("extend", "model", NAMES[method], *kept, data="windows")


def _frame(losses: Losses, windows: int = 3) -> pl.DataFrame:
    """Windows whose tokens lose so much on average, and a little more in later windows."""
    parts = []
    for method, by_length in losses.items():
        for length, loss in by_length.items():
            units = [f"window {number}" for number in range(windows)]
            each = [loss + (0.1 + APART[method]) * number for number in range(windows)]
            for protocol in (LAST, TRAIN) if length == L else (LAST,):
                rows = [
                    sums("loss", units, TOKENS * np.array(each), np.full(windows, TOKENS)),
                    sums("accuracy", units, np.full(windows, TOKENS / 2), np.full(windows, TOKENS)),
                ]
                parts.append(with_identity(_identity(method, length, protocol), rows))
    return concat(parts)


def _advice(losses: Losses, windows: int = 3) -> Advice:
    return advise(View(_frame(losses, windows)))


def _lines(plain: Sequence[float], **methods: Sequence[float]) -> Losses:
    """Losses at L, 2 L, 4 L, …"""
    return {
        name: {L * 2**power: loss for power, loss in enumerate(values)}
        for name, values in {"": plain, **methods}.items()
    }


@pytest.mark.parametrize(
    ("losses", "span", "method"),
    [
        (_lines((3.0, 4.0, 5.0), YaRN=(3.03, 3.0, 3.0), PI=(3.5, 3.5, 3.5)), "up to 32", "YaRN"),
        (_lines((3.0, 4.0, 5.0), YaRN=(3.0001, 3.2, 3.0), PI=(2.5, 3.0, 3.5)), "at 32", "YaRN"),
        (_lines((3, 4, 5, 6), YaRN=(2.7, 3.2, 3, 3), PI=(2.9, 3, 4, 4)), "from 32 to 64", "YaRN"),
        (_lines((3.0, 3.0, 3.0), YaRN=(3.1, 3.1, 3.1)), "at 32", None),
        (_lines((3.0, 3.0), YaRN=(3.0, 3.0 - 1.1 * LEAST_GAIN)), "up to 16", "YaRN"),
        (_lines((3.0, 3.0), YaRN=(3.0, 3.0 - 0.9 * LEAST_GAIN)), "at 16", None),  # too small a gain
    ],
)
def test_the_advice_names_the_lengths(losses: Losses, span: str, method: str | None) -> None:
    advice = _advice(losses)
    assert advice.method == method
    assert f" {span} tokens" in advice.sentences[0]
    assert (method or "unmodified") in advice.sentences[0]


def test_a_method_that_costs_is_for_longer_texts_alone() -> None:
    both = (_advice(_lines((3.0, 4.0), YaRN=(at_l, 3.0))) for at_l in (3.03, 2.97))
    costly, free = (advice.sentences for advice in both)
    assert "+1.0 [" in costly[0]
    assert "-1.0 [" in free[0]
    assert (len(costly), len(free)) == (4, 3)


def test_one_window_is_one_reading_and_lengths_are_read_in_all_windows() -> None:
    advice = _advice(_lines((3.0, 4.0), YaRN=(3.0, 3.0)), windows=1)
    assert advice.method is None
    assert "one window" in advice.sentences[-1]
    frame = _frame(_lines((3.0, 4.0), YaRN=(3.1, 3.0)))
    found = complete(frame.remove(method="YaRN", length=16, unit="window 2"), 3)
    assert set(found.select("method", "length").rows()) == {("", 8), ("", 16), ("YaRN", 8)}


@pytest.mark.parametrize(
    ("lengths", "known"), [((4, 8, 16), 8), ((2, 4, 16), 4), ((16, 32), 16), ((8,), 8)]
)
def test_what_changes_are_measured_from(lengths: tuple[int, ...], known: int) -> None:
    """The training length, 8, or else what was read that comes nearest from below, or above."""
    loss = [sums(LOSS.name, ["window 0"], [1.0], [1.0])]
    frame = concat(with_identity(_identity("", length, LAST), loss) for length in lengths)
    assert extend.home_length(View(frame)) == known


# Several models and texts on one page: each row is what the page of its own folder says.
LOSSES = {"a": _lines((3.0, 4.0), YaRN=(3.1, 3.2)), "b": _lines((2.0, 2.5), PI=(2.6, 2.7))}


def _folder(place: Path, text: str, model: str = "model") -> Path:
    """What `extend` leaves: a configuration and a frame."""
    place.mkdir()
    config = {"model": f"/models/{model}.gguf", "text": [f"/texts/{text}.txt"]}
    sizes = {"windows": 3, "train_length": 8}
    stored = {"format": FORMAT, "kind": extend.KIND, "config": {**config, **sizes}}
    (place / "config.json").write_text(json.dumps(stored))
    measured = _frame(LOSSES[text]).with_columns(pl.lit(model).alias("row"))
    measurements.write(place / measurements.FILE, measured)
    return place


def _texts(table: FilledTable) -> dict[str, dict[str, str]]:
    """What each cell says, by the name of its row and the key of its column."""
    keys, lines = [column.key for column in table.columns], table.cells
    texts = [dict(zip(keys, (cell.text for cell in line), strict=True)) for line in lines]
    return {line[0].text: named for line, named in zip(lines, texts, strict=True)}


def test_every_row_is_that_of_its_own_page(tmp_path: Path) -> None:
    places = [_folder(tmp_path / "1", "a"), _folder(tmp_path / "2", "b")]
    places.append(_folder(tmp_path / "3", "a", "other"))
    made = context(extend.GALLERY.page, extend.combine(places)[0]).tables[0]
    rows = _texts(made)
    alone = {}
    for place, of in zip(places, ("model, a", "model, b", "other, a"), strict=True):
        own = context(extend.STUDY.page, measurements.read(place / measurements.FILE)).tables
        tables = {table.key: _texts(table) for table in own}
        for key, column, here in (
            ("table", "loss_8", "loss_1"),
            ("table", "loss_16", "loss_2"),
            ("change", "change_16", "change"),
            ("cost", "change", "cost"),
            ("table", "parameters", "parameters"),
        ):
            for row, texts in tables[key].items():
                alone[f"{of}.txt: {row}", here] = texts[column]
    assert {(label, key): rows[label][key] for label, key in alone} == alone
    assert len(rows) == 6
    assert rows["model, a.txt: YaRN"]["change"].startswith("+0.200")
    on_a, on_b, _ = made.notes
    assert on_a.startswith("model on a.txt (3 windows, L = 8): YaRN (YaRN(factor=4))")
    assert on_b.startswith("model on b.txt (3 windows, L = 8): No method is clearly better")


@pytest.mark.usefixtures("runs_here")
def test_the_command_and_its_frame(tmp_path: Path, command: Command) -> None:
    places, out = [_folder(tmp_path / text, text) for text in "ab"], tmp_path / "all"
    pages = []
    for arguments in ([*places, "--out", out], [out]):
        command.done("report", *arguments)
        pages.append((out / "report.html").read_text())
    assert pages[0] == pages[1]
    assert "model, b.txt: PI" in (out / "table.md").read_text()
    stored = json.loads((out / "config.json").read_text())
    assert stored["kind"] == extend.GALLERY.name
    assert stored["config"]["model, a.txt"] == {"windows": 3, "train_length": 8}
    before = (places[0] / measurements.FILE).read_bytes()
    (out / "config.json").write_text('{"format": 1, "kind": "keynorm", "config": {}}')
    for options, said in (
        (("--out", out, "--study", "reading"), "leave --study out"),
        ((), "another --out"),
        (("--out", out), "belongs to keynorm: give another --out"),
    ):
        assert said in command("report", *places, *options).last
    assert (places[0] / measurements.FILE).read_bytes() == before


def test_one_text_twice_is_refused(tmp_path: Path) -> None:
    twice = [_folder(tmp_path / "1", "a"), _folder(tmp_path / "2", "a")]
    with pytest.raises(InputError, match=r"1 and .*2 both hold model on a\.txt"):
        extend.combine(twice)
    with pytest.raises(InputError, match=r"1 and .*1 both hold model on a\.txt"):
        extend.combine(twice[:1] * 2)

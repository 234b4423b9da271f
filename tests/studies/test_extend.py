"""What `normattn extend` advises and shows, from a frame whose losses are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
import pytest

from normattn.lab.report.figures import Intervals
from normattn.lab.report.page import context
from normattn.lab.report.view import View
from normattn.lab.stats import Identity, identified, joined, sums
from normattn.lab.studies.advice import LAST, LEAST_GAIN, LOSS, TRAIN, Advice, advise, home
from normattn.lab.studies.extend import EXACT, KEY, PREFILL, SECONDS, STUDY, complete

L, TOKENS = 8, 8
NAMES = {"": "unmodified", "PI": "PI", "YaRN": "YaRN(factor=4)"}
# Windows differ a little by method: a difference that is the same in all has no interval.
APART = {"": 0.0, "PI": 1e-4, "YaRN": -1e-4}
Losses = dict[str, dict[int, float]]


def _identity(method: str, length: int, protocol: str) -> Identity:
    return Identity(
        study="extend",
        row="model",
        score=NAMES[method],
        method=method,
        seed=0,
        protocol=protocol,
        length=length,
        train_length=L,
        data="windows",
    )


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
                parts.append(identified(_identity(method, length, protocol), rows))
    return joined(parts)


def _advice(losses: Losses, windows: int = 3) -> Advice:
    return advise(View(_frame(losses, windows)))


def _lines(plain: Sequence[float], **methods: Sequence[float]) -> Losses:
    """Losses at L, 2 L, 4 L, …"""
    return {
        name: {L * 2**power: loss for power, loss in enumerate(values)}
        for name, values in {"": plain, **methods}.items()
    }


@pytest.mark.parametrize(
    ("losses", "headline", "method"),
    [
        (
            _lines((3.0, 4.0, 5.0), YaRN=(3.03, 3.0, 3.0), PI=(3.5, 3.5, 3.5)),
            "YaRN (YaRN(factor=4)): best up to 32 tokens; costs 1.0 % of loss at 8.",
            "YaRN",
        ),
        (
            _lines((3.0, 4.0, 5.0), YaRN=(3.0001, 3.2, 3.0), PI=(2.5, 3.0, 3.5)),
            "YaRN (YaRN(factor=4)): best at 32 tokens; no significant cost at 8 (loss +0.0 "
            "[+0.0, +0.0] %).",
            "YaRN",
        ),
        (
            _lines((3.0, 4.0, 5.0, 6.0), YaRN=(2.7, 3.2, 3.0, 3.0), PI=(2.9, 3.0, 3.5, 3.5)),
            "YaRN (YaRN(factor=4)): best from 32 to 64 tokens; costs nothing at 8, where "
            "the loss falls by 9.7 %.",
            "YaRN",
        ),
        (
            _lines((3.0, 3.0, 3.0), YaRN=(3.1, 3.1, 3.1)),
            "No method is clearly better than the unmodified model at 32 tokens.",
            None,
        ),
    ],
)
def test_the_headline_names_the_lengths(losses: Losses, headline: str, method: str | None) -> None:
    advice = _advice(losses)
    assert advice.sentences[0] == headline
    assert advice.method == method


@pytest.mark.parametrize("share", [0.9, 1.1])
def test_a_gain_too_small_to_matter_is_no_advice(share: float) -> None:
    advice = _advice(_lines((3.0, 3.0), YaRN=(3.0, 3.0 - share * LEAST_GAIN)))
    assert (advice.method == "YaRN") == (share > 1)
    small = "At 16 tokens the lowest loss is YaRN's, by less than 0.01 nats: "
    assert advice.sentences[-1].startswith(small) == (share < 1)


def test_one_window_is_one_reading() -> None:
    advice = _advice(_lines((3.0, 4.0), YaRN=(3.0, 3.0)), windows=1)
    assert advice.method is None
    assert any("One window has no interval" in sentence for sentence in advice.sentences)


def test_methods_as_good_as_the_best_are_named() -> None:
    advice = _advice(_lines((3.0, 4.0), YaRN=(3.1, 3.0), PI=(3.0, 3.0)))
    assert any("Not distinguishable from it: " in sentence for sentence in advice.sentences)


def test_a_length_that_was_not_read_in_all_windows_is_left_out() -> None:
    frame = _frame(_lines((3.0, 4.0), YaRN=(3.1, 3.0)))
    cut = frame.remove(method="YaRN", length=16, unit="window 2")
    found = complete(cut, 3)
    assert set(found.select("method", "length").rows()) == {("", 8), ("", 16), ("YaRN", 8)}


def test_every_column_of_the_page() -> None:
    frame = _frame(_lines((3.0, 4.0), YaRN=(3.3, 3.5)))
    units = ["window 0", "window 1", "window 2"]
    more = [
        identified(_identity("", 16, PREFILL), [sums(SECONDS, units, [1.0, 2.0, 9.0], [1.0] * 3)]),
        identified(
            _identity("", 16, PREFILL), [sums("peak_bytes", units, [2**20, 3 * 2**20, 0], [1] * 3)]
        ),
        identified(_identity("", 16, KEY), [sums(EXACT.name, units, [1, 0, 1], [1] * 3)]),
    ]
    made = context(STUDY.page, joined([frame, *more]))
    tables = {
        table.key: {
            (line[0].text, column.key): cell.text
            for line in table.cells
            for column, cell in zip(table.columns, line, strict=True)
        }
        for table in made.tables
    }
    assert tables["table"]["unmodified", "loss_8"].startswith("3.100 [")
    assert tables["table"]["YaRN", "loss_16"].startswith("3.600 [")
    assert tables["table"]["YaRN", "parameters"] == "YaRN(factor=4)"
    assert tables["change"]["YaRN", "change_16"].startswith("+0.500 [")
    assert tables["change"]["YaRN", "change_8"].startswith("+0.300 [")
    assert tables["change"]["unmodified", "change_16"] == "+1.000 [no interval]"
    assert tables["change"]["unmodified", "change_8"] == "–"
    assert tables["accuracy"]["unmodified", "accuracy_16"].startswith("50.0")
    assert tables["cost"]["YaRN", "change"].startswith("+9.67 [")
    assert tables["prefill"]["unmodified", "seconds_16"] == "2.0"
    assert tables["prefill"]["unmodified", "bytes_16"] == "3"
    assert tables["prefill"]["unmodified", "keys_16"].startswith("66.7 [")
    assert tables["prefill"]["YaRN", "keys_16"] == "–"
    drawn = made.figures[0]
    assert isinstance(drawn, Intervals)
    assert drawn.rows == ("unmodified", "YaRN")
    assert "after 8, for the same last tokens" in drawn.title
    values = [[None if e is None else e.value for e in column.values] for column in drawn.columns]
    assert values == [
        [None, pytest.approx(0.3, abs=1e-3)],
        [pytest.approx(1.0), pytest.approx(0.5, abs=1e-3)],
    ]


@pytest.mark.parametrize(
    ("lengths", "known"), [((4, 8, 16), 8), ((2, 4, 16), 4), ((16, 32), 16), ((8,), 8)]
)
def test_what_changes_are_measured_from(lengths: tuple[int, ...], known: int) -> None:
    """The training length, 8, or else what was read that comes nearest from below, or above."""
    rows = [
        identified(_identity("", length, LAST), [sums(LOSS.name, ["window 0"], [1.0], [1.0])])
        for length in lengths
    ]
    assert home(View(joined(rows))) == known

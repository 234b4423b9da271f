"""What `normattn extend` advises and shows, from a frame whose losses are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
import pytest

from normattn.lab.report.view import View
from normattn.lab.stats import Identity, concat, sums, with_identity
from normattn.lab.studies.advice import LAST, LEAST_GAIN, LOSS, TRAIN, Advice, advise, home_length
from normattn.lab.studies.extend import complete

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
        (
            _lines((3.0, 4.0, 5.0, 6.0), YaRN=(2.7, 3.2, 3.0, 3.0), PI=(2.9, 3.0, 3.5, 3.5)),
            "from 32 to 64",
            "YaRN",
        ),
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
    costly, free = (
        _advice(_lines((3.0, 4.0), YaRN=(at_l, 3.0))).sentences for at_l in (3.03, 2.97)
    )
    assert "+1.0 [" in costly[0]
    assert "-1.0 [" in free[0]
    assert (len(costly), len(free)) == (4, 3)


def test_one_window_is_one_reading() -> None:
    advice = _advice(_lines((3.0, 4.0), YaRN=(3.0, 3.0)), windows=1)
    assert advice.method is None
    assert "one window" in advice.sentences[-1]


def test_a_length_that_was_not_read_in_all_windows_is_left_out() -> None:
    frame = _frame(_lines((3.0, 4.0), YaRN=(3.1, 3.0)))
    cut = frame.remove(method="YaRN", length=16, unit="window 2")
    found = complete(cut, 3)
    assert set(found.select("method", "length").rows()) == {("", 8), ("", 16), ("YaRN", 8)}


@pytest.mark.parametrize(
    ("lengths", "known"), [((4, 8, 16), 8), ((2, 4, 16), 4), ((16, 32), 16), ((8,), 8)]
)
def test_what_changes_are_measured_from(lengths: tuple[int, ...], known: int) -> None:
    """The training length, 8, or else what was read that comes nearest from below, or above."""
    rows = [
        with_identity(_identity("", length, LAST), [sums(LOSS.name, ["window 0"], [1.0], [1.0])])
        for length in lengths
    ]
    assert home_length(View(concat(rows))) == known

"""What `normattn extend` advises, from readings whose losses are known."""

from __future__ import annotations

import pytest

from normattn.reports.extension_advice import LEAST_GAIN, Advice, advise
from normattn.reports.extension_cells import Readings
from normattn.reports.extension_records import TextUnit
from reports.make import L, make_record

TOKENS = 8
NAMES = {"": "as is", "PI": "PI", "YaRN": "YaRN(factor=4)"}
Losses = dict[str, dict[int, float]]


def _unit(method: str, length: int, loss: float, window: int) -> TextUnit:
    """A window whose tokens lose `loss` nats on average, and a little more in later windows."""
    protocols = ("last_segment", "train_length") if length == L else ("last_segment",)
    records = tuple(
        make_record(
            [[TOKENS // 2]],
            tokens=[[TOKENS]],
            loss=[[TOKENS * (loss + 0.1 * window)]],
            variant="model",
            method=method,
            name=method or "as is",
            spec=NAMES[method],
            protocol=protocol,
            length=length,
            edges=(length - TOKENS, length),
            documents=[f"window {window}"],
        )
        for protocol in protocols
    )
    return TextUnit(
        method=method or "as is",
        length=length,
        window=window,
        records=records,
        prefill_seconds=1.0,
        peak_bytes=None,
        device="cpu",
        threads=1,
    )


def _advice(losses: Losses, windows: int = 3) -> Advice:
    units = [
        _unit(method, length, loss, window)
        for method, by_length in losses.items()
        for length, loss in by_length.items()
        for window in range(windows)
    ]
    return advise(Readings(units, windows), sorted(losses[""]))


def _lines(plain: tuple[float, ...], **methods: tuple[float, ...]) -> Losses:
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
            "YaRN(factor=4): best up to 32 tokens; costs 1.0 % of loss at 8.",
            "YaRN",
        ),
        (
            _lines((3.0, 4.0, 5.0), YaRN=(3.0, 3.2, 3.0), PI=(2.5, 3.0, 3.5)),
            "YaRN(factor=4): best at 32 tokens; costs nothing that is sure at 8 (loss +0.0 "
            "[+0.0, +0.0] %).",
            "YaRN",
        ),
        (
            _lines((3.0, 4.0, 5.0, 6.0), YaRN=(2.7, 3.2, 3.0, 3.0), PI=(2.9, 3.0, 3.5, 3.5)),
            "YaRN(factor=4): best from 32 to 64 tokens; costs nothing at 8, where the loss falls "
            "by 9.7 %.",
            "YaRN",
        ),
        (
            _lines((3.0, 3.0, 3.0), YaRN=(3.1, 3.1, 3.1)),
            "No method is clearly better than the model as it is at 32 tokens.",
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
    small = "At 16 tokens the lowest loss is YaRN(factor=4)'s, by less than 0.01 nats: "
    assert advice.sentences[-1].startswith(small) == (share < 1)


def test_one_window_is_one_reading() -> None:
    advice = _advice(_lines((3.0, 4.0), YaRN=(3.0, 3.0)), windows=1)
    assert advice.method is None
    assert any("One window has no interval" in sentence for sentence in advice.sentences)


def test_methods_as_good_as_the_best_are_named() -> None:
    advice = _advice(_lines((3.0, 4.0), YaRN=(3.1, 3.0), PI=(3.0, 3.0)))
    assert any("Not told apart from it: " in sentence for sentence in advice.sentences)

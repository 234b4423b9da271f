"""The progress bar."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from normattn.lab.training.progress import ProgressBar
from normattn.lab.training.task import StepReport
from normattn.terminal import Console

REPORT = StepReport(10, 10, 1.23456, 0.5, 1e-3, {}, 640, 4321.0, 1.0)


def drawn(terminal: bool) -> str:
    text = io.StringIO()
    bar = ProgressBar(Console(file=text, force_terminal=terminal, width=120))
    bar.start(0, 10)
    bar.step(REPORT)
    bar.stop()
    return text.getvalue()


def test_a_terminal_sees_loss_rate_and_steps() -> None:
    text = drawn(terminal=True)
    for part in ("1.2346", "4,321 tokens/s", "10/10"):
        assert part in text


def test_a_pipe_gets_a_line_every_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn(terminal=False) == ""
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    text = io.StringIO()
    bar = ProgressBar(Console(file=text, width=20))
    bar.start(1_000, 3_000)
    for step in range(1_001, 1_101):
        clock[0] += 1.0
        bar.step(replace(REPORT, step=step, steps=3_000, seconds=clock[0] - 100))
    bar.stop()
    assert text.getvalue().splitlines() == [
        "step 1,030 of 3,000, loss 1.2346, 4,321 tokens/s, 0:32:50 left",
        "step 1,060 of 3,000, loss 1.2346, 4,321 tokens/s, 0:32:20 left",
        "step 1,090 of 3,000, loss 1.2346, 4,321 tokens/s, 0:31:50 left",
    ]

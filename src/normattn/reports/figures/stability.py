"""The learning-rate ladder as figures: loss by rate, the largest logit and entropy by step."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

from normattn.reports.figures.lines import COLOURS, Level, Line, LinePanel, draw_lines
from normattn.reports.metrics import Estimate
from normattn.reports.stability import Ladder, Trace


def draw_ladder(ladder: Ladder, folder: Path) -> list[Path]:
    """Draw `loss_by_learning_rate`, `largest_logit` and `attention_entropy`; the files written."""
    colours = dict(zip(ladder.scores, cycle(COLOURS), strict=False))
    paths = _draw_losses(ladder, colours, folder)
    if any(run.traces for rung in ladder.rungs.values() for run in rung.runs):
        paths += _draw_traces(
            ladder,
            colours,
            folder,
            "largest_logit",
            title="The largest attention logit while training, by learning rate",
            label="largest logit (log₁₀)",
            of=lambda trace: _log10(trace.largest),
        )
        paths += _draw_traces(
            ladder,
            colours,
            folder,
            "attention_entropy",
            title="Attention entropy while training, by learning rate",
            label="entropy / ln n",
            of=lambda trace: trace.entropy,
        )
    return paths


def _draw_losses(ladder: Ladder, colours: dict[str, str], folder: Path) -> list[Path]:
    lines = []
    for score in ladder.scores:
        points = [
            (_log2(rung.rate), rung.loss)
            for rung in ladder.of_score(score)
            if rung.loss is not None
        ]
        if points:
            lines.append(Line(score, tuple(points), colours[score]))
    levels: tuple[Level, ...] = ()
    if ladder.unigram is not None:
        guess = Estimate(ladder.unigram, None, None, 0, 0, 1)
        levels = (Level("unigram", guess, "#808080"),)
    panel = LinePanel("after training", "test loss (nats per token)", tuple(lines), levels)
    return draw_lines(
        [panel],
        folder,
        "loss_by_learning_rate",
        title="Which scores bear a high learning rate",
        caption=(
            "A line has no point where the training ended in NaN. Dotted: guessing each word by "
            "its frequency. Upright lines: 95 % bootstrap interval over sentences (and seeds)."
        ),
        x_label="learning rate, in units of the preset's",
        x_ticks=[(_log2(rate), f"×{rate:g}") for rate in ladder.rates],
    )


def _draw_traces(
    ladder: Ladder,
    colours: dict[str, str],
    folder: Path,
    stem: str,
    *,
    title: str,
    label: str,
    of: Callable[[Trace], float],
) -> list[Path]:
    drawn = [of(t) for rung in ladder.rungs.values() for run in rung.runs for t in run.traces]
    margin = 0.05 * (max(drawn) - min(drawn)) + 1e-3
    limits = (min(drawn) - margin, max(drawn) + margin)
    panels = []
    for rate in ladder.rates:
        lines = []
        for score in ladder.scores:
            rung = ladder.rungs.get((score, rate))
            points = rung.over_steps(of) if rung else ()
            if points:
                lines.append(Line(score, points, colours[score]))
        if lines:
            title_of = f"learning rate ×{rate:g}"
            panels.append(LinePanel(title_of, label, tuple(lines), limits=limits))
    return draw_lines(
        panels,
        folder,
        stem,
        title=title,
        caption=(
            "Over all layers and heads of encoder, decoder and cross attention: the largest logit "
            "of any, the mean entropy. Several seeds: their mean, upright lines from the least to "
            "the greatest. A line ends where the training ended in NaN."
        ),
        x_label="training step",
    )


def _log2(value: float) -> float:
    return math.log2(value)


def _log10(value: float) -> float:
    return math.log10(max(value, 1e-3))

"""The norm study's figure: F1 and loss on the development set, and training loss, by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from normattn.reports.figures.lines import COLOURS, Line, LinePanel, draw_lines
from normattn.reports.metrics import Estimate
from normattn.reports.rmsnorm_records import Training

_PANELS = (
    ("micro_f1", "micro F1, development set", "F1 (%)", 100.0),
    ("macro_f1", "macro F1, development set", "F1 (%)", 100.0),
    ("loss", "loss, development set", "thousandths of a nat", 1000.0),
)


def draw_training(trainings: Mapping[tuple[str, int], Training], folder: Path) -> list[Path]:
    """Draw the curves of every norm as `training`; return the files written."""
    norms = sorted({norm for norm, _ in trainings})
    runs = {
        norm: [t for (name, _), t in sorted(trainings.items()) if name == norm] for norm in norms
    }
    colours = dict(zip(norms, COLOURS, strict=False))
    panels = [
        LinePanel(
            title,
            label,
            tuple(
                Line(norm, points, colours[norm], dashed=place > 0)
                for place, norm in enumerate(norms)
                if (points := _development(runs[norm], key, scale))
            ),
        )
        for key, title, label, scale in _PANELS
    ]
    lines = tuple(
        Line(norm, _trained(runs[norm]), colours[norm], dashed=place > 0)
        for place, norm in enumerate(norms)
    )
    panels.append(LinePanel("loss, training batches", "thousandths of a nat", lines))
    panels = [panel for panel in panels if panel.lines]
    return draw_lines(
        panels,
        folder,
        "training",
        title="LayerNorm and RMSNorm, step by step",
        caption=(
            "Means over seeds; upright lines run from the lowest to the highest seed. F1 at the "
            "threshold that is best on the development set there and then. Training loss: the mean "
            "since the point before."
        ),
        x_label="optimiser step",
        columns=2,
    )


def _development(
    runs: Sequence[Training], key: str, scale: float
) -> tuple[tuple[float, Estimate], ...]:
    """The mean over seeds at every step that all of them looked at."""
    by_step = [
        {int(line["step"]): scale * float(line[key]) for line in run.development} for run in runs
    ]
    steps = sorted(set.intersection(*(set(each) for each in by_step)))
    return tuple((float(step), _spread([each[step] for each in by_step])) for step in steps)


def _trained(runs: Sequence[Training]) -> tuple[tuple[float, Estimate], ...]:
    """The mean loss between one look at the development set and the next."""
    ends = sorted({int(line["step"]) for run in runs for line in run.development})
    ends = ends or [run.steps for run in runs][:1]
    points, before = [], 0
    for end in ends:
        means = [_mean_loss(run, before, end) for run in runs]
        known = [mean for mean in means if mean is not None]
        if known:
            points.append((float(end), _spread(known)))
        before = end
    return tuple(points)


def _mean_loss(run: Training, before: int, end: int) -> float | None:
    losses = [1000.0 * float(line["loss"]) for line in run.metrics if before < line["step"] <= end]
    return float(np.mean(losses)) if losses else None


def _spread(values: Sequence[float]) -> Estimate:
    return Estimate(float(np.mean(values)), min(values), max(values), 0, 0, len(values))

"""Loss curves of training runs, read from their metrics files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from normattn.errors import InputError
from normattn.files import open_file
from normattn.reports.cells import VARIANT_ORDER
from normattn.reports.figures.style import (
    house_style,
    label_ends,
    label_width,
    line_style,
    paged_stem,
    save,
    variant_pages,
)
from normattn.structured import json_lines, parse_json

Series = tuple[NDArray[np.float64], NDArray[np.float64]]


def draw_history(runs: Mapping[str, Sequence[Path]], folder: Path) -> list[Path]:
    """Draw loss by step as `training_loss`: one line per seed, coloured by variant.

    More than 8 variants go on in `training_loss_2` and so on.
    `runs` maps a variant's name to the metrics.jsonl files of its runs. A thin line is every
    logged step, a thick one its running mean over about a fiftieth of the run. A half-written last
    line (a run that is still going) is left out. Raises `InputError` for a file that cannot be
    read or that holds no loss.
    """
    names = sorted(runs, key=_order)
    series = {name: [read_losses(path) for path in runs[name]] for name in names}
    series = {name: losses for name, losses in series.items() if losses}
    if not series:
        raise InputError("there is no training history to draw: no metrics file was given")
    paths = []
    for page, shown in enumerate(variant_pages(list(series))):
        with house_style():
            figure = _figure({name: series[name] for name in shown})
            paths += save(figure, folder, paged_stem("training_loss", page))
    return paths


def _figure(series: Mapping[str, Sequence[Series]]) -> Figure:
    beside = label_width(list(series))
    width = 7.1 + beside
    figure = Figure(figsize=(width, 5.0), dpi=150)
    axis = figure.add_axes((0.7 / width, 0.2, 6.2 / width, 0.68))
    ends, colours = [], []
    for name, runs in series.items():
        style = line_style(name, list(series))
        for steps, losses in runs:
            axis.plot(steps, losses, color=style["color"], linewidth=0.4, alpha=0.25)
            smooth = _running_mean(losses)
            axis.plot(
                steps, smooth, color=style["color"], linestyle=style["linestyle"], linewidth=1.3
            )
        if runs:
            ends.append((name, float(steps[-1]), float(smooth[-1])))
            colours.append(style["color"])
    axis.set_ylim(*_limits([losses for group in series.values() for _, losses in group]))
    axis.set_xlabel("training step")
    axis.set_ylabel("training loss (nats per token)")
    low, high = map(float, axis.get_ylim())
    label_ends(axis, ends, colours, (high - low) * 0.045)
    figure.text(0.02, 0.94, "Training loss of every run", fontsize=11, fontweight="bold")
    figure.text(
        0.02,
        0.02,
        "Faint: every logged step. Strong: running mean over about a fiftieth of the run. "
        "Dashed: trained with log-n scaling.\nSeveral lines of one kind are its seeds; the "
        "name stands at the last seed's end.",
        fontsize=7.5,
        color="#404040",
    )
    return figure


def read_losses(path: Path) -> Series:
    """Steps and losses of a metrics.jsonl file."""
    points = []
    with open_file(path) as file:
        for number, line in json_lines(file, lambda n: f"{path}, line {n},"):
            value = _parse(line)
            # A last line that is being written has no end yet.
            if value is None and line.endswith(b"\n"):
                raise InputError(f"{path} is damaged: line {number} is not a JSON object")
            if value is not None and isinstance(value.get("loss"), int | float):
                points.append((float(value["step"]), float(value["loss"])))
    if not points:
        raise InputError(f"{path} holds no loss")
    steps, losses = zip(*points, strict=True)
    return np.asarray(steps), np.asarray(losses)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = parse_json(line, "a metrics line")
    except InputError:
        return None
    return value if isinstance(value, dict) and type(value.get("step")) is int else None


def _running_mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean over a centred window that shrinks at both ends."""
    half = len(values) // 100
    sums = np.concatenate(([0.0], np.cumsum(values)))
    index = np.arange(len(values))
    reach = np.minimum(half, np.minimum(index, len(values) - 1 - index))
    return np.asarray((sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1))


def _limits(losses: list[NDArray[np.float64]]) -> tuple[float, float]:
    """Limits that cut the first steep steps away, so that the runs' ends can be told apart."""
    finite = [values[np.isfinite(values)] for values in losses]
    low = min(float(values.min()) for values in finite)
    high = max(float(np.percentile(values, 98)) for values in finite)
    pad = 0.05 * (high - low) + 0.01
    return low - pad, high + pad


def _order(name: str) -> tuple[int, str]:
    return (VARIANT_ORDER.index(name) if name in VARIANT_ORDER else len(VARIANT_ORDER), name)

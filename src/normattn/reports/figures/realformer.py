"""The RealFormer study's figures: loss over steps, what changes with depth, the robustness grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import wrap

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from normattn.reports.bootstrap import Bootstrap
from normattn.reports.figures.lines import Line, LinePanel, draw_lines
from normattn.reports.figures.style import house_style, save, write_around
from normattn.reports.history import Series
from normattn.reports.metrics import Estimate
from normattn.reports.realformer_grid import GridCell, Panel
from normattn.reports.realformer_rows import EncoderRow, Ratio, by_layer

_COLOURS = {
    "PostLN": "#000000",
    "RealFormer": "#D55E00",
    "PreLN": "#0072B2",
    "RealFormer-PreLN": "#009E73",
    "ResidualQK": "#CC79A7",
    "DeepNorm": "#E69F00",
    "ReZero": "#56B4E9",
    "ReZeroNoNorm": "#8C6D31",
    "FixedScale": "#7F7F7F",
    "RealFormer-mean": "#AA4466",
}
GROUPS = {
    "residual scores": (
        *("PostLN", "RealFormer", "PreLN", "RealFormer-PreLN", "ResidualQK"),
        "RealFormer-mean",
    ),
    "placements": ("PostLN", "PreLN", "DeepNorm", "ReZero", "ReZeroNoNorm", "FixedScale"),
    "one block for all layers": (*("PostLN", "RealFormer", "PostLN-shared", "RealFormer-shared"),),
}
"""Which rows share a panel, by its title."""
_BINS = 24
_CELL, _LINE = 0.62, 0.34  # inches


def draw_depth(rows: Sequence[EncoderRow], bootstrap: Bootstrap, folder: Path) -> list[Path]:
    """Draw what changes from layer to layer: one figure for each statistic."""
    intervals = "Upright lines: 95 % bootstrap intervals over documents, and over seeds."
    paths = _draw(
        *(rows, bootstrap, folder, "accuracy_by_exit", lambda row: row.layers("correct"), 1),
        title="How good is it to stop after a layer?",
        label="accuracy (%)",
        caption="Masked tokens that are hit after each layer: by an exit of its own (a norm and a "
        "matrix, trained beside the model on detached vectors) and the shared head; after the last "
        f"layer by the model itself. {intervals}",
    )
    paths += _draw(
        *(rows, bootstrap, folder, "residual_variance", lambda row: row.layers("variance"), 0),
        title="Does the residual stream grow with depth?",
        label="variance (log₁₀)",
        caption="Variance over the features, mean over tokens; 0 is what the first layer reads. "
        f"{intervals}",
        log=True,
    )
    paths += _draw(
        *(rows, bootstrap, folder, "attention_entropy", lambda row: row.layers("entropy"), 1),
        title="How spread is attention?",
        label="entropy (nats)",
        caption=f"Mean over heads and tokens; ln n is uniform. {intervals}",
    )
    for stem, what in (("agreement", "head by head"), ("agreement_mean", "mean over heads")):
        paths += _draw(
            *(rows, bootstrap, folder, f"attention_{stem}", _layers_of(stem), 2),
            title=f"Does attention repeat that of the layer below? ({what})",
            label="1 − total variation",
            caption="Share of the weights that a layer's attention has in common with that of the "
            f"layer below: Σ_j min(α, α′), mean over tokens; {what}. {intervals}",
        )
    for stem, when in (("gradients_start", "before training"), ("gradients", "after training")):
        paths += _draw(
            *(rows, bootstrap, folder, stem, _gradients_of(stem), 1),
            title=f"The gradient of each layer, {when}",
            label="gradient norm (log₁₀)",
            caption="Norm of the loss's gradient by a layer's parameters on held-out text; upright "
            "lines: 95 % bootstrap intervals over batches, and over seeds. Layers that share their "
            "weights have no gradient of their own.",
            log=True,
        )
    return paths


def _layers_of(name: str) -> Callable[[EncoderRow], Ratio | None]:
    return lambda row: row.layers(name)


def _gradients_of(name: str) -> Callable[[EncoderRow], Ratio | None]:
    return lambda row: row.gradients(name)


def _draw(
    rows: Sequence[EncoderRow],
    bootstrap: Bootstrap,
    folder: Path,
    stem: str,
    of: Callable[[EncoderRow], Ratio | None],
    first: int,
    *,
    title: str,
    label: str,
    caption: str,
    log: bool = False,
) -> list[Path]:
    """One statistic by layer, whose first bin is layer `first`."""
    panels = []
    for name, group in _panels(rows):
        lines = []
        for row in group:
            statistic = of(row)
            if statistic is None or statistic.above.shape[-1] == 0:
                continue
            values = by_layer(statistic, row.counts, bootstrap)
            shown = [_logarithm(each) for each in values] if log else values
            points = tuple((float(first + n), each) for n, each in enumerate(shown))
            lines.append(_line(row.setting.row, points))
        if lines:
            panels.append(LinePanel(name, label, tuple(lines)))
    if not panels:
        return []
    deepest = max(row.setting.layers for row in rows)
    ticks = [(float(n), str(n)) for n in range(first, deepest + 1) if deepest <= 12 or n % 2 == 0]
    return draw_lines(
        panels, folder, stem, title=title, caption=caption, x_label="after layer", x_ticks=ticks
    )


def _panels(rows: Sequence[EncoderRow]) -> list[tuple[str, list[EncoderRow]]]:
    """The rows of each group and size, where there are at least two beside each other."""
    sizes = list(dict.fromkeys(row.setting.size for row in rows))
    found = []
    shown: set[tuple[tuple[str, str], ...]] = set()
    for size in sizes:
        for title, names in GROUPS.items():
            group = [row for name in names for row in rows if row.key == (size, name)]
            keys = tuple(sorted(row.key for row in group))
            if len(group) > 1 and not any(set(keys) <= set(other) for other in shown):
                found.append((f"{size}: {title}" if len(sizes) > 1 else title, group))
                shown.add(keys)
    return found


def _line(name: str, points: tuple[tuple[float, Estimate], ...]) -> Line:
    base = name.removesuffix("-shared").removesuffix("-half")
    return Line(name, points, _COLOURS.get(base, "#332288"), dashed=base != name)


def _logarithm(value: Estimate) -> Estimate:
    """The estimate on a logarithmic scale; what is 0 there stands at its least."""

    def log(x: float | None) -> float | None:
        return None if x is None else math.log10(max(x, 1e-12))

    return replace(value, value=log(value.value) or 0.0, low=log(value.low), high=log(value.high))


def draw_losses(losses: Mapping[tuple[str, str], Sequence[Series]], folder: Path) -> list[Path]:
    """Draw the training loss by step of every row: means of spans of steps, over its seeds."""
    sizes = list(dict.fromkeys(size for size, _ in losses))
    panels = []
    for size in sizes:
        for title, names in GROUPS.items():
            wanted = [*names, *("RealFormer-half",) * (title == "residual scores")]
            lines = [
                _line(name, _spans(losses[size, name]))
                for name in wanted
                if losses.get((size, name))
            ]
            fresh = {line.name for line in lines} - {"PostLN", "PreLN", "RealFormer"}
            if len(lines) > 1 and (fresh or title == "residual scores"):
                name = f"{size}: {title}" if len(sizes) > 1 else title
                panels.append(LinePanel(name, "loss (nats per masked token)", tuple(lines)))
    if not panels:
        return []
    return draw_lines(
        panels,
        folder,
        "training_loss",
        title="Training loss",
        caption="Means over spans of steps and over seeds; upright lines: from the lowest to the "
        "highest seed.",
        x_label="step",
    )


def _spans(runs: Sequence[Series]) -> tuple[tuple[float, Estimate], ...]:
    """The mean loss of each of `_BINS` spans of steps, with its range over seeds."""
    last = max(float(steps[-1]) for steps, _ in runs)
    points = []
    for span in range(_BINS):
        low, high = last * span / _BINS, last * (span + 1) / _BINS
        inside = [loss[(steps > low) & (steps <= high)] for steps, loss in runs]
        means = [float(each.mean()) for each in inside if len(each)]
        if means:
            value = sum(means) / len(means)
            estimate = Estimate(value, min(means), max(means), 0, 0, len(means))
            points.append((high, estimate))
    return tuple(points)


def draw_grid(panels: Sequence[Panel], folder: Path) -> list[Path]:
    """Draw `robustness`: a heat map dropout × learning rate for every row, by warm-up."""
    if not panels:
        return []
    names = list(dict.fromkeys(panel.row for panel in panels))
    warmups = sorted({panel.warmup for panel in panels}, reverse=True)
    cells = [cell for panel in panels for cell in panel.cells.values()]
    rates = sorted({cell.learning_rate for cell in cells})
    dropouts = sorted({cell.dropout for cell in cells})
    known = [cell.loss.value for cell in cells if cell.loss and cell.state == "learned"]
    ends = (min(known), max(known)) if known else (0.0, 1.0)
    wide, high = _CELL * len(rates), _LINE * len(dropouts)
    width = max(6.6, 1.0 + (wide + 0.45) * len(names))
    heading = wrap("Which learning rates and dropouts does it survive?", round(10 * width))
    caption = wrap(
        "Held-out loss in nats per masked token, brighter is better. Hatched: diverged (the loss "
        "stopped being finite), or stuck at about the loss of the words' frequencies alone.",
        round(16 * width),
    )
    top, bottom, gap = 0.75 + 0.2 * len(heading), 0.65 + 0.14 * len(caption), 1.0
    size = (width, len(warmups) * (high + gap) - gap + top + bottom)
    with house_style():
        figure = Figure(figsize=size, dpi=150)
        for panel in panels:
            column, line = names.index(panel.row), warmups.index(panel.warmup)
            x, y = 0.85 + (wide + 0.45) * column, size[1] - top - high - (high + gap) * line
            place = (x / size[0], y / size[1], wide / size[0], high / size[1])
            _heat(figure.add_axes(place), panel, rates, dropouts, ends, edge=column == 0)
        write_around(figure, size, heading, caption)
        return save(figure, folder, "robustness")


def _heat(
    axis: Axes,
    panel: Panel,
    rates: Sequence[float],
    dropouts: Sequence[float],
    ends: tuple[float, float],
    edge: bool,
) -> None:
    axis.set_xlim(0, len(rates))
    axis.set_ylim(len(dropouts), 0)
    axis.grid(False)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0, labelsize=7)
    axis.set_xticks([n + 0.5 for n in range(len(rates))], [f"{rate:g}" for rate in rates])
    axis.set_yticks([n + 0.5 for n in range(len(dropouts))], [f"{drop:g}" for drop in dropouts])
    axis.set_xlabel("learning rate", fontsize=7.5)
    if edge:
        axis.set_ylabel("dropout", fontsize=8)
    said = f"warm-up of {panel.warmup} steps" if panel.warmup else "no warm-up"
    axis.set_title(f"{panel.row}\n{said}", loc="left", fontsize=8)
    for (rate, dropout), cell in panel.cells.items():
        _fill(axis, rates.index(rate), dropouts.index(dropout), cell, ends)


def _fill(axis: Axes, x: int, y: int, cell: GridCell, ends: tuple[float, float]) -> None:
    text = "div." if cell.loss is None else f"{cell.loss.value:.2f}"
    if cell.loss is None or cell.state != "learned":
        grey = Rectangle((x, y), 1, 1, facecolor="#F2F2F2", edgecolor="#BDBDBD", linewidth=0)
        grey.set_hatch("////")
        axis.add_patch(grey)
        colour, box = "#404040", {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    else:
        low, high = ends
        share = 0.5 if high == low else (high - cell.loss.value) / (high - low)
        face = mpl.colormaps["cividis"](share)
        axis.add_patch(Rectangle((x, y), 1, 1, facecolor=face, linewidth=0))
        colour, box = "white" if share < 0.47 else "black", None
    axis.text(
        x + 0.5, y + 0.52, text, ha="center", va="center", fontsize=7.5, color=colour, bbox=box
    )

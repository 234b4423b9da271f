"""The study's figures: training loss, what changes with depth, the robustness grid."""

from __future__ import annotations

from collections.abc import Iterator

from normattn.lab.report.figure import Curves, Figure, Grid, Line, Panel, Point
from normattn.lab.report.points import bin_points, step_points
from normattn.lab.report.view import View
from normattn.lab.stats import Metric
from normattn.lab.studies.realformer.reading import BY_LAYER, SIZE, depth, grid, names, sizes
from normattn.lab.studies.realformer.settings import ROWS

GROUPS = {
    "residual scores": (
        *("PostLN", "RealFormer", "PreLN", "RealFormer-PreLN", "ResidualQK"),
        *("ResidualQKV", "RealFormer-mean", "RealFormer-half"),
    ),
    "placements": ("PostLN", "PreLN", "DeepNorm", "ReZero", "ReZeroNoNorm", "FixedScale"),
    "from a trained PostLN": ("PostLN", "RealFormer", "PostLN-continued", "RealFormer-from-PostLN"),
    "one block for all layers": ("PostLN", "RealFormer", "PostLN-shared", "RealFormer-shared"),
}
"""Which rows share a panel, by its title."""

_FIGURES = {
    "exit_accuracy": ("accuracy_by_exit", "Accuracy after each layer", "accuracy (%)"),
    "variance": ("residual_variance", "Variance of the residual stream", "variance"),
    "entropy": ("attention_entropy", "Entropy of attention", "entropy (nats)"),
    "agreement": (
        "attention_agreement",
        "Agreement of attention with the layer below, head by head",
        "1 − total variation",
    ),
    "agreement_mean": (
        "attention_agreement_mean",
        "Agreement of attention with the layer below, mean over heads",
        "1 − total variation",
    ),
    "gradients_start": (
        "gradients_start",
        "Gradient of each layer before training",
        "gradient norm",
    ),
    "gradients": ("gradients", "Gradient of each layer after training", "gradient norm"),
}
_LOGARITHMIC = ("variance", "gradients_start", "gradients")


def figures(view: View) -> list[Figure]:
    """Training loss, each statistic by layer, the robustness grid."""
    return [
        _losses(view),
        *(_by_layer(view, statistic) for statistic in BY_LAYER),
        _robustness(view),
    ]


def _groups(view: View) -> Iterator[tuple[str, str, list[str]]]:
    """A title, the size and the rows of each panel: at least two, not all of another's."""
    every = sizes(view)
    for size in every:
        shown: list[set[str]] = []
        own = names(view, size)
        for title, members in GROUPS.items():
            rows = [row for row in members if row in own]
            if len(rows) > 1 and not any(set(rows) <= other for other in shown):
                yield (f"{size}: {title}" if len(every) > 1 else title), size, rows
                shown.append(set(rows))


def _line(row: str, points: tuple[Point, ...]) -> Line:
    """Rows that differ in their steps, their start or in sharing one block have one colour."""
    setting = ROWS[row]
    plain = setting.model_copy(update={"half": False, "shared": False, "start": None})
    family = next(name for name, other in ROWS.items() if other == plain)
    return Line(row, points, family, dashed=setting != plain)


def _losses(view: View) -> Figure:
    panels = tuple(
        Panel(
            title,
            # The loss on record of a row with a start is that of its start's training.
            tuple(
                _line(row, step_points(view, "loss", {"row": row, SIZE: size}))
                for row in rows
                if ROWS[row].start is None
            ),
            "step",
            "loss (nats per masked token)",
        )
        for title, size, rows in _groups(view)
    )
    return Curves("training_loss", "Training loss; bands: all seeds", panels)


def _by_layer(view: View, statistic: Metric) -> Figure:
    name, title, label = _FIGURES[statistic.name]
    panels = []
    for panel, size, rows in _groups(view):
        lines = []
        for row in rows:
            plotted = bin_points(view, statistic, depth(row, size), lambda bin_: bin_[0])
            if plotted:
                lines.append(_line(row, plotted))
        log = statistic.name in _LOGARITHMIC
        panels.append(Panel(panel, tuple(lines), "after layer", label, log_y=log))
    return Curves(name, title, tuple(panels))


def _robustness(view: View) -> Figure:
    """Held-out loss of every setting; one that failed has no colour and says how."""
    outcomes = grid(view)
    lines = list(dict.fromkeys((setting.row, setting.warmup) for setting in outcomes))
    places = list(dict.fromkeys((s.learning_rate, s.dropout) for s in outcomes))
    values: dict[tuple[object, object], float | None] = {}
    texts: dict[tuple[object, object], str] = {}
    for setting, outcome in outcomes.items():
        key = (setting[:2], setting[2:])
        values[key] = None if outcome.failed else outcome.loss
        said = [] if outcome.loss is None else [f"{outcome.loss:.2f}"]
        texts[key] = " ".join([*said, *([outcome.state] if outcome.failed else [])])
    return Grid(
        "robustness",
        "Robustness to learning rate and dropout: held-out loss",
        tuple(f"{row}, warm-up of {n} steps" if n else f"{row}, no warm-up" for row, n in lines),
        tuple(f"{rate:g}, {dropout:g}" for rate, dropout in places),
        tuple(tuple(values.get((line, point)) for point in places) for line in lines),
        tuple(tuple(texts.get((line, point), "") for point in places) for line in lines),
        x_title="learning rate, dropout",
        scale_title="loss (nats per masked token)",
    )

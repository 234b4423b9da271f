"""The figures of the QK-Norm study."""

from __future__ import annotations

from normattn.lab.report.figure import Curves, Figure, IntervalColumn, Intervals, Line, Panel, Point
from normattn.lab.report.points import points, step_points
from normattn.lab.report.view import View
from normattn.lab.stats import Metric
from normattn.lab.stats.metrics import BLEU
from normattn.lab.studies.qknorm.images import IMAGES
from normattn.lab.studies.qknorm.measured import (
    IMAGE_ACCURACY,
    IMAGE_LOSS,
    LOSS,
    as_multiple,
    multiples,
    rows_of,
    scores,
    training,
    unigram,
)
from normattn.lab.studies.qknorm.translation import RATES, TRANSLATION

OF_RATE = "learning rate, in units of the preset's"


def figures(view: View) -> list[Figure]:
    """Scores by their results, results by learning rate, logits and entropy by step."""
    return [
        _by_score(view, "bleu_by_score", "Translation by score", TRANSLATION, (BLEU, LOSS)),
        _losses(view),
        _by_step(view, "largest_logit", "largest_logit", "largest logit", log=True),
        _by_step(view, "entropy_share", "attention_entropy", "entropy / ln n", log=False),
        _history(view),
        _by_score(view, "vision_by_score", "Images by score", IMAGES, (IMAGE_ACCURACY, IMAGE_LOSS)),
        Curves(
            "vision_by_learning_rate",
            "Images: accuracy by learning rate",
            (
                Panel(
                    "after training",
                    _by_rate(view, IMAGES, IMAGE_ACCURACY),
                    OF_RATE,
                    "accuracy (%)",
                    log_x=True,
                ),
            ),
        ),
    ]


def _by_score(
    view: View, name: str, title: str, experiment: str, statistics: tuple[Metric, ...]
) -> Figure:
    """Every score at the preset's learning rate; of fewer than two there is nothing to compare."""
    rows = [
        score
        for score in scores(view, experiment)
        if view.sums(LOSS.name, rows_of(experiment, score, 1.0)) is not None
    ]
    columns = tuple(
        IntervalColumn(
            f"{statistic.title} ({statistic.unit})" if statistic.unit else statistic.title,
            tuple(view.estimate(statistic, rows_of(experiment, score, 1.0)) for score in rows),
        )
        for statistic in statistics
    )
    return Intervals(name, title, tuple(rows), columns if len(rows) > 1 else ())


def _losses(view: View) -> Figure:
    """The final loss by learning rate, and what guessing by frequency comes to."""
    lines = _by_rate(view, RATES, LOSS)
    guess, rates = unigram(view), multiples(view, RATES)
    if guess is not None:
        level = tuple(Point(rate, guess) for rate in rates)
        lines = (*lines, Line("unigram baseline", level, dashed=True))
    panel = Panel("after training", lines, OF_RATE, "test loss (nats per token)", log_x=True)
    return Curves("loss_by_learning_rate", "Test loss by learning rate", (panel,))


def _by_rate(view: View, experiment: str, statistic: Metric) -> tuple[Line, ...]:
    """A line for every score trained at several rates; no point where every seed ended in NaN."""
    lines = []
    for score in scores(view, experiment):
        rates = multiples(view, experiment, score)
        plotted = points(view, statistic, ((x, rows_of(experiment, score, x)) for x in rates))
        if len(rates) > 1 and plotted:
            lines.append(Line(score, plotted, score))
    return tuple(lines)


def _by_step(view: View, statistic: str, name: str, title: str, log: bool) -> Figure:
    """A panel for every rate; a line ends where the last training ended."""
    panels = []
    for rate in multiples(view, RATES):
        lines = tuple(
            Line(score, steps, score)
            for score in scores(view, RATES)
            if (steps := step_points(view, statistic, training(rows_of(RATES, score, rate))))
        )
        if lines:
            rated = f"learning rate {as_multiple(rate)}"
            panels.append(Panel(rated, lines, "training step", title, log_y=log))
    whole = f"{title[0].upper()}{title[1:]} while training, by learning rate; bands: all seeds"
    return Curves(name, whole, tuple(panels))


def _history(view: View) -> Figure:
    """Training loss of the table's rows by step."""
    lines = tuple(
        Line(score, steps, score)
        for score in scores(view, TRANSLATION)
        if (steps := step_points(view, "loss", training(rows_of(TRANSLATION, score))))
    )
    panel = Panel("", lines, "training step", "training loss (nats per token)")
    return Curves("training_loss", "Training loss; bands: all seeds", (panel,))

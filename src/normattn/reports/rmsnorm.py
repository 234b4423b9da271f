"""The norm study's table and figure: F1, loss and time of LayerNorm and RMSNorm."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from normattn.atomic import write_text
from normattn.errors import InputError
from normattn.reports.bootstrap import Bootstrap
from normattn.reports.classification_record import ClassificationRecord
from normattn.reports.figures.rmsnorm import draw_training
from normattn.reports.markdown import grid, shown
from normattn.reports.metrics import Estimate
from normattn.reports.rmsnorm_records import StepTimes, Training
from normattn.reports.rmsnorm_rows import (
    LAYER,
    METRICS,
    RMS,
    NormRow,
    differences,
    norm_rows,
    time_ratio,
)

Trainings = Mapping[tuple[str, int], Training]

SOURCE = {LAYER: (95.85, 231.0), RMS: (95.59, 215.0)}
"""What the source claims for NYT24 with 7.92M parameters: F1 in %, seconds of training."""


def rmsnorm_report(
    records: Sequence[ClassificationRecord],
    trainings: Trainings,
    times: StepTimes | None,
    diverged: Mapping[str, str],
    out: Path,
    bootstrap: Bootstrap | None = None,
) -> list[Path]:
    """Write table.md, .csv, .json and the figure into `out`; return the figure's files.

    `diverged` says of each run that diverged how: that is a result, also where all of them did.
    Raises `InputError` for records of different data, and where there is nothing to report. The
    same records give the same bytes.
    """
    if not records and not diverged:
        raise InputError("there is nothing to report: no classifier was tested")
    drawn = bootstrap or Bootstrap()
    rows = norm_rows(records, trainings, times, drawn)
    change = differences(records, drawn)
    speed = None if times is None else time_ratio(times, drawn)
    page = _markdown(rows, change, speed, times, diverged, records, drawn)
    write_text(out / "table.md", page)
    facts = {
        "rows": [row.as_json() for row in rows],
        "difference": {key: value.as_json() for key, value in change.items()},
        "step_time_ratio": None if speed is None else speed.as_json(),
    }
    write_text(out / "table.json", json.dumps(facts, indent=2, allow_nan=False) + "\n")
    write_text(out / "table.csv", _csv(rows))
    return draw_training(trainings, out / "figures") if trainings else []


def _markdown(
    rows: Sequence[NormRow],
    change: Mapping[str, Estimate],
    speed: Estimate | None,
    times: StepTimes | None,
    diverged: Mapping[str, str],
    records: Sequence[ClassificationRecord],
    drawn: Bootstrap,
) -> str:
    ends = "\n".join(f"- {name} diverged: {said}" for name, said in sorted(diverged.items()))
    if not records:
        return f"# LayerNorm against RMSNorm\n\nNo training came to its end.\n\n{ends}\n"
    first = records[0]
    head = (
        *("norm", "micro F1, %", "macro F1, %", "loss, mnats", "threshold", "parameters"),
        *("step, ms", "training, s", "source: F1, %", "source: s"),
    )
    parts = [
        "# LayerNorm against RMSNorm",
        f"Which of {len(first.labels)} labels a document has; {len(first.documents):,} test "
        f"documents. In brackets: {drawn.level:.0%} intervals from {drawn.resamples} bootstrap "
        "resamples of the documents, and of the seeds where there are several. The source's "
        "columns are its claims for NYT24, on another machine: not measured here.",
        grid(head, (_line(row) for row in rows)),
        _legend(times),
        _behind(rows),
        _comparison(rows, change, speed),
        ends,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _line(row: NormRow) -> tuple[str, ...]:
    f1, seconds = SOURCE[row.norm]
    thresholds = sorted(set(row.thresholds))
    spread = [f"{thresholds[0]:.2f}", *([f"{thresholds[-1]:.2f}"] if len(thresholds) > 1 else [])]
    return (
        row.norm,
        *(shown(row.metrics[key], digits=METRICS[key].digits) for key in METRICS),
        " to ".join(spread),
        f"{row.parameters:,}",
        shown(row.step),
        "–" if row.seconds is None else f"{row.seconds:.0f}",
        f"{f1:.2f}",
        f"{seconds:.0f}",
    )


def _legend(times: StepTimes | None) -> str:
    lines = [
        "- micro F1: of all labels together; macro F1: the mean over the labels that are true or",
        "  predicted anywhere in the test set. Both, and their intervals, of the decisions of all",
        "  seeds together; torchmetrics' values, seed by seed, stand in the runs' records.",
        "- loss: binary cross-entropy on the test set, the mean over documents and labels, in",
        "  thousandths of a nat.",
        "- threshold: what a label's probability must reach; tuned on the development set alone,",
        "  for each seed.",
        "- training: seconds of a whole training as it ran here, beside other work, with looks at",
        "  the development set; the mean over seeds.",
    ]
    if times is not None:
        lines += [
            f"- step: median of an optimiser step of {times.batch_size} documents "
            f"({times.precision}, {times.device}, {times.threads} "
            f"thread{'s' * (times.threads > 1)}),",
            f"  both norms in turn in one process, {len(next(iter(times.seconds.values())))} "
            "rounds on the same batches; intervals resample the rounds.",
        ]
    return "\n".join(lines)


def _behind(rows: Sequence[NormRow]) -> str:
    seeds = "; ".join(f"{row.norm}: {', '.join(map(str, row.seeds))}" for row in rows)
    few = min(len(row.seeds) for row in rows)
    warning = (
        " With one seed an interval speaks of these models only."
        if few == 1
        else f" With {few} seeds intervals understate how much further seeds would vary."
    )
    return f"Seeds: {seeds}.{warning * (few < 10)}"


def _comparison(
    rows: Sequence[NormRow], change: Mapping[str, Estimate], speed: Estimate | None
) -> str:
    """RMSNorm against LayerNorm, paired, beside the source's two claims."""
    if not change:
        return ""
    lines = [
        f"- {METRICS[key].title}: {shown(value, signed=True, digits=METRICS[key].digits)}"
        f"{_verdict(value, key)}"
        for key, value in change.items()
    ]
    claimed_f1 = SOURCE[RMS][0] - SOURCE[LAYER][0]
    claimed_time = SOURCE[RMS][1] / SOURCE[LAYER][1]
    if speed is not None:
        lines.append(f"- time of a step, as a ratio: {shown(speed, digits=3)}{_faster(speed)}")
    seconds = {row.norm: row.seconds for row in rows}
    ours, other = seconds.get(RMS), seconds.get(LAYER)
    if ours and other:
        lines.append(
            f"- time of training, as a ratio: {ours / other:.2f} (without an interval: these ran "
            "beside other work)"
        )
    lines.append(
        f"- the source claims {claimed_f1:+.2f} points of F1 and a time ratio of "
        f"{claimed_time:.3f} (215 s against 231 s)."
    )
    return (
        "## RMSNorm against LayerNorm\n\nDifferences RMSNorm − LayerNorm, paired over documents "
        "and seeds; an interval that holds 0 (a ratio: 1) is no finding.\n\n" + "\n".join(lines)
    )


def _verdict(value: Estimate, key: str) -> str:
    higher = METRICS[key].higher
    if value.above_zero or value.below_zero:
        better = value.above_zero == higher
        return f": RMSNorm is {'better' if better else 'worse'}."
    return ": no difference can be told."


def _faster(value: Estimate) -> str:
    if value.low is not None and value.low > 1:
        return ": RMSNorm is slower here."
    if value.high is not None and value.high < 1:
        return ": RMSNorm is faster, as the source says."
    return ": no difference can be told."


def _csv(rows: Sequence[NormRow]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [f"{key}{end}" for key in METRICS for end in ("", "_low", "_high")]
    steps = ("step_ms", "step_ms_low", "step_ms_high")
    writer.writerow(("norm", "parameters", "seeds", "documents", *names, *steps, "training_s"))
    for row in rows:
        values = [row.metrics[key] for key in METRICS]
        numbers = [
            number
            for value in (*values, row.step)
            for number in ((value.value, value.low, value.high) if value else (None,) * 3)
        ]
        head = (row.norm, row.parameters, len(row.seeds), values[0].documents)
        writer.writerow((*head, *numbers, row.seconds))
    return text.getvalue()

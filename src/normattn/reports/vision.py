"""The page of the Vision Transformers: accuracy by score, and at higher learning rates."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from normattn.atomic import write_text
from normattn.reports.bootstrap import Bootstrap
from normattn.reports.figures.intervals import Column, draw_intervals
from normattn.reports.figures.lines import Line, LinePanel, draw_lines
from normattn.reports.figures.style import line_style
from normattn.reports.markdown import FEW, few_note, grid, shown
from normattn.reports.vision_record import STATISTICS, VisionDivergence, VisionRecord
from normattn.reports.vision_rows import VisionRow, vision_rows


def vision_report(
    records: Sequence[VisionRecord],
    diverged: Sequence[VisionDivergence],
    out: Path,
    *,
    order: Sequence[str] = (),
    setting: Mapping[str, str] | None = None,
    bootstrap: Bootstrap | None = None,
) -> list[Path]:
    """Write vision.md, .csv, .json and the figures into `out`; return the figures' files.

    `order` names the rows that come first, `setting` what was trained on what. The same records
    give the same bytes. Raises `InputError` for records of different images, and where there is
    nothing to report.
    """
    rows = vision_rows(records, diverged, order, bootstrap)
    table = [row for row in rows if row.rate == 1]
    write_text(out / "vision.md", _page(rows, table, setting or {}, bootstrap or Bootstrap()))
    facts = {"rows": [row.as_json() for row in rows]}
    text = json.dumps(facts, indent=2, ensure_ascii=False, allow_nan=False)
    write_text(out / "vision.json", text + "\n")
    write_text(out / "vision.csv", _csv(rows))
    return _draw(table, rows, out / "figures")


def _page(
    rows: Sequence[VisionRow],
    table: Sequence[VisionRow],
    setting: Mapping[str, str],
    bootstrap: Bootstrap,
) -> str:
    intro = (
        f"With {bootstrap.level:.0%} intervals from {bootstrap.resamples} bootstrap resamples of "
        "the images, and of the seeds where there are several. Δ: difference to Baseline, paired "
        "over images and seeds; an interval that holds 0 is no finding."
    )
    parts = [
        "# QK-Norm in a Vision Transformer",
        "\n".join(f"- {name}: {value}" for name, value in setting.items()),
        intro,
        _table(table) if table else "",
        _behind(rows),
        _ladder(rows),
        _findings(rows),
        "\n".join(f"- {each.sentence}" for row in rows for each in row.diverged),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(rows: Sequence[VisionRow]) -> str:
    head = ["score", *(s.title for s in STATISTICS), *(f"Δ {s.key}" for s in STATISTICS)]
    lines = []
    for row in rows:
        if not row.records:
            step = row.diverged[0].step
            lines.append((row.score, f"diverged at step {step}", *[""] * (len(head) - 2)))
            continue
        values = (shown(row.values[s.key], digits=s.digits) for s in STATISTICS)
        changes = (
            ""
            if row.changes[s.key] is None
            else shown(row.changes[s.key], signed=True, digits=s.digits)
            for s in STATISTICS
        )
        lines.append((row.score + (" ‡" if row.diverged else ""), *values, *changes))
    return grid(head, lines)


def _behind(rows: Sequence[VisionRow]) -> str:
    records = [record for row in rows for record in row.records]
    if not records:
        return ""
    first, seeds = records[0], sorted({record.seed for record in records})
    smallest = min(record.parameters for record in records)
    largest = max(record.parameters for record in records)
    size = f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"
    text = (
        f"Behind each value: {len(first.loss):,} images of the {first.split} split, "
        f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}; {first.classes} classes, "
        f"{first.tokens_per_image} tokens an image, {size} parameters, {first.steps:,} steps."
    )
    if len(seeds) == 1:
        text += " With one seed a difference speaks of these two trained models only."
    elif len(seeds) < 5:
        text += " Resampling so few seeds understates how much further seeds would vary."
    return text + (few_note("images") if len(first.loss) < FEW else "")


def _findings(rows: Sequence[VisionRow]) -> str:
    """Differences to Baseline, at the same rate, that exclude 0, and how many were looked at."""
    kept, count = [], 0
    for row in rows:
        for s in STATISTICS:
            change = row.changes[s.key]
            if change is None:
                continue
            count += 1
            if change.above_zero or change.below_zero:
                word = "better" if change.above_zero == s.higher else "worse"
                amount = shown(change, signed=True, digits=s.digits)
                at = "" if row.rate == 1 else f" at ×{row.rate:g}"
                seeds = f"{change.seeds} seed{'s' * (change.seeds > 1)}"
                kept.append(f"- {row.score}{at}: {s.key} {amount}, {word} ({seeds}).")
    if not count:
        return ""
    head = (
        f"Of {count} differences to Baseline {len(kept)} exclude 0 (each stands alone: no "
        "correction for their number; one seed speaks of these two trained models only)"
    )
    return head + (":\n\n" + "\n".join(kept) if kept else ".")


def _ladder(rows: Sequence[VisionRow]) -> str:
    """Accuracy by learning rate, where there are several rates."""
    rates, found = _rates(rows), {(row.score, row.rate): row for row in rows}
    if len(rates) < 2:
        return ""
    scores = [name for name in dict.fromkeys(row.score for row in rows) if _climbs(name, rows)]
    titles = []
    for rate in rates:
        row = next(row for row in rows if row.rate == rate)
        titles.append(f"×{rate:g} ({row.learning_rate:.3g})")
    head = ("score", *titles)
    lines = [(name, *(_rung(found.get((name, rate))) for rate in rates)) for name in scores]
    inner = [(name, *(_inner(found.get((name, rate))) for rate in rates)) for name in scores]
    text = f"Accuracy (%) at so many times the learning rate:\n\n{grid(head, lines)}"
    if any(each != "–" for line in inner for each in line[1:]):
        text += (
            "\n\nThe largest logit of any step that was looked into, and the entropy of attention "
            "at the last one as a share of ln n (mean over layers, heads and seeds; 1: spread "
            f"evenly, 0: one key takes all):\n\n{grid(head, inner)}"
        )
    return text


def _rung(row: VisionRow | None) -> str:
    if row is None:
        return "–"
    if not row.records:
        return f"NaN at step {row.diverged[0].step}"
    ended = f" ({len(row.diverged)} of {len(row.records) + len(row.diverged)} seeds ended in NaN)"
    return shown(row.values["accuracy"], digits=1) + (ended if row.diverged else "")


def _inner(row: VisionRow | None) -> str:
    records = () if row is None else row.records
    largest = [record.largest for record in records if record.largest is not None]
    shares = [record.entropy_share for record in records if record.entropy_share is not None]
    if not largest or not shares:
        return "–"
    return f"{max(largest):.3g}; {sum(shares) / len(shares):.2f}"


def _rates(rows: Sequence[VisionRow]) -> list[float]:
    return sorted({row.rate for row in rows})


def _climbs(score: str, rows: Sequence[VisionRow]) -> bool:
    return sum(row.score == score for row in rows) > 1


def _csv(rows: Sequence[VisionRow]) -> str:
    """One line for each score and rate: every statistic, its difference, the ends of both."""
    names = [each.key for each in STATISTICS]
    head = ["score", "rate", "learning_rate", "seeds", "images"]
    for name in (*names, *(f"change_{name}" for name in names)):
        head += [name, f"{name}_low", f"{name}_high"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*head, "diverged_at_step"])
    for row in rows:
        seeds = " ".join(str(record.seed) for record in row.records)
        images = len(row.records[0].loss) if row.records else ""
        line: list[object] = [row.score, row.rate, row.learning_rate, seeds, images]
        for each in [row.values[n] for n in names] + [row.changes[n] for n in names]:
            line += ["", "", ""] if each is None else [each.value, each.low, each.high]
        writer.writerow([*line, row.diverged[0].step if row.diverged else ""])
    return text.getvalue()


def _draw(table: Sequence[VisionRow], rows: Sequence[VisionRow], folder: Path) -> list[Path]:
    paths: list[Path] = []
    measured = [row for row in table if row.records]
    if len(measured) > 1:
        columns = [
            Column(s.title, [(row.score, row.values[s.key]) for row in measured])
            for s in STATISTICS
        ]
        paths += draw_intervals(
            columns,
            folder,
            "vision_by_score",
            title="Images by score",
            caption=(
                "Dots: the test set as a whole. Lines: 95 % bootstrap interval over images (and "
                "seeds); intervals of two rows may overlap although their paired difference "
                "excludes 0. Dotted: Baseline."
            ),
        )
    return paths + _draw_ladder(rows, folder)


def _draw_ladder(rows: Sequence[VisionRow], folder: Path) -> list[Path]:
    rates = _rates(rows)
    if len(rates) < 2:
        return []
    scores = [name for name in dict.fromkeys(row.score for row in rows) if _climbs(name, rows)]
    lines = []
    for name in scores:
        points = tuple(
            (math.log2(row.rate), value)
            for row in rows
            if row.score == name and (value := row.values["accuracy"]) is not None
        )
        if points:
            lines.append(Line(name, points, str(line_style(name, scores)["color"])))
    if not lines:
        return []
    return draw_lines(
        [LinePanel("Vision Transformer", "accuracy (%)", tuple(lines))],
        folder,
        "vision_ladder",
        title="Images: accuracy by learning rate",
        caption="95 % bootstrap intervals over images (and seeds). Trainings in NaN have no dot.",
        x_label="times the learning rate",
        x_ticks=[(math.log2(rate), f"×{rate:g}") for rate in rates],
    )

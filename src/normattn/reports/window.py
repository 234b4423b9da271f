"""The window study's table and figure: accuracy against w / L, one line per form of log-n."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from normattn.atomic import write_text
from normattn.errors import InputError
from normattn.reports.bootstrap import Bootstrap
from normattn.reports.build import table_csv, table_json
from normattn.reports.cells import Cells
from normattn.reports.figures.lines import COLOURS, Level, Line, LinePanel, draw_lines
from normattn.reports.markdown import column_title, grid, shown
from normattn.reports.metrics import METRICS, Estimate, difference
from normattn.reports.records import Record
from normattn.reports.table import Divergence, Row, table_rows

_COLUMNS = ("repeated", "repeated_seen", "non_repeated", "last_segment", "tax")
_DRAWN = ("non_repeated", "repeated", "last_segment")
_FORMS = ("no log-n", "log-n†", "log-n trained")


@dataclass(frozen=True)
class Reading:
    """What a row's specification means: its form of log-n, and its window (None: no ReRoPE)."""

    form: str
    window: int | None

    @property
    def order(self) -> tuple[int, int]:
        """Forms in the order of `_FORMS`, windows ascending, the model as it is first."""
        place = _FORMS.index(self.form) if self.form in _FORMS else len(_FORMS)
        return place, self.window or 0


def window_report(
    records: Sequence[Record],
    diverged: Sequence[Divergence],
    readings: Mapping[str, Reading],
    out: Path,
    bootstrap: Bootstrap | None = None,
) -> list[Path]:
    """Write table.md, .csv, .json and the figure into `out`; return the figure's files.

    `readings` says of each record's specification what it means; others are refused. The same
    records give the same bytes.
    """
    drawn = bootstrap or Bootstrap()
    unknown = sorted({record.spec for record in records} - readings.keys())
    if unknown:
        raise InputError(f"{out} holds records of {unknown[0]}, which is no part of this study")
    cells = Cells(records)
    rows = table_rows(cells, diverged, drawn)
    if not rows:
        raise InputError("there is nothing to report: no evaluation record was found")
    measured = sorted((row for row in rows if not row.empty), key=lambda r: _of(r, readings).order)
    write_text(out / "table.md", _markdown(measured, rows, cells, readings, drawn))
    write_text(out / "table.csv", table_csv(rows))
    write_text(out / "table.json", table_json(rows))
    return _figure(measured, readings, out / "figures") if measured else []


def _of(row: Row, readings: Mapping[str, Reading]) -> Reading:
    return readings[row.key.spec]


def _markdown(
    measured: Sequence[Row],
    rows: Sequence[Row],
    cells: Cells,
    readings: Mapping[str, Reading],
    bootstrap: Bootstrap,
) -> str:
    head = ("log-n", "w / L", "w", *(column_title(measured, key) for key in _COLUMNS))
    lines = []
    for row in measured:
        reading = _of(row, readings)
        share, window = _shares(row, reading)
        values = (shown(row.metrics[key], signed=key == "tax") for key in _COLUMNS)
        lines.append((reading.form, share, window, *values))
    parts = [
        "# ReRoPE's window",
        f"Token accuracy in %, with {bootstrap.level:.0%} intervals from {bootstrap.resamples} "
        "bootstrap resamples of the documents, and of the seeds where there are several. One "
        "model is trained without and one with log-n; log-n† is switched on after training. "
        "Rows without a window are the models without ReRoPE.",
        grid(head, lines),
        "- repeated: a segment tiled to the whole context; seen: only the tokens whose answer "
        "stands\n  earlier. non-repeated: natural held-out text. last segment: the last training "
        "length of\n  tokens after the longest context.\n"
        "- tax: what the method changes at the training length when it is switched on there, in "
        "points.",
        _behind(measured),
        _differences(measured, cells, readings, bootstrap),
        *(
            f"{each.variant}, seed {each.seed}, diverged at step {each.step} in {each.where}."
            for each in dict.fromkeys(d for row in rows for d in row.diverged)
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _shares(row: Row, reading: Reading) -> tuple[str, str]:
    if reading.window is None:
        return "–", "–"
    return str(Fraction(reading.window, row.key.train_length)), str(reading.window)


def _behind(rows: Sequence[Row]) -> str:
    found: list[Estimate] = [v for row in rows for v in row.metrics.values() if v is not None]
    documents = sorted({v.documents for v in found})
    seeds = sorted({seed for row in rows for seed in row.seeds})
    return (
        f"Behind each value: {documents[0]} to {documents[-1]} documents, "
        f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}."
    )


def _differences(
    rows: Sequence[Row], cells: Cells, readings: Mapping[str, Reading], bootstrap: Bootstrap
) -> str:
    """Each form of log-n against none at the same window, paired over documents and seeds."""
    plain = {r.window: row for row in rows if (r := _of(row, readings)).form == _FORMS[0]}
    lines = []
    for row in rows:
        reading = _of(row, readings)
        base = plain.get(reading.window)
        if reading.form == _FORMS[0] or base is None:
            continue
        values = [_difference(cells, row, base, key, bootstrap) for key in _DRAWN]
        share, window = _shares(row, reading)
        texts = (shown(value, signed=True) for value in values)
        lines.append((reading.form, share, window, *texts))
    if not lines:
        return ""
    head = ("log-n", "w / L", "w", *(column_title(rows, key) for key in _DRAWN))
    return (
        "Differences to no log-n at the same window, in points, paired over documents and seeds; "
        "an interval that holds 0 is no finding, and with one seed it speaks of these models "
        f"only:\n\n{grid(head, lines)}"
    )


def _difference(
    cells: Cells, row: Row, base: Row, key: str, bootstrap: Bootstrap
) -> Estimate | None:
    metric = METRICS[key]
    a, b = cells.get(row.key, metric.protocol), cells.get(base.key, metric.protocol)
    if a is None or b is None or not set(a.seeds) & set(b.seeds):
        return None
    return difference(a, b, metric, bootstrap)


def _figure(rows: Sequence[Row], readings: Mapping[str, Reading], folder: Path) -> list[Path]:
    forms = list(dict.fromkeys(_of(row, readings).form for row in rows))
    colours = dict(zip(forms, COLOURS, strict=False))
    panels = []
    for key in _DRAWN:
        lines, levels = [], []
        for form in forms:
            of_form = [row for row in rows if _of(row, readings).form == form]
            points = []
            for row in of_form:
                value, window = row.metrics[key], _of(row, readings).window
                if value is not None and window is not None:
                    points.append((window / row.key.train_length, value))
                elif value is not None:
                    levels.append(Level(f"{form}, as is", value, colours[form]))
            if points:
                lines.append(Line(form, tuple(points), colours[form], dashed=form == _FORMS[2]))
        panels.append(
            LinePanel(column_title(rows, key), "accuracy (%)", tuple(lines), tuple(levels))
        )
    windows = sorted({(w, r.key.train_length) for r in rows if (w := _of(r, readings).window)})
    ticks = [(w / length, _tick(Fraction(w, length))) for w, length in windows]
    return draw_lines(
        panels,
        folder,
        "accuracy_by_window",
        title="Accuracy past the training length against ReRoPE's window",
        caption=(
            "ReRoPE lets relative positions grow up to the window w and no further; L is the "
            "training length. Upright lines: 95 % bootstrap interval over documents (and seeds). "
            "Dotted, with a band: the same models without ReRoPE. Dashed, hollow: trained with "
            "log-n; log-n† is switched on after training."
        ),
        x_label="window w / L",
        x_ticks=ticks,
    )


def _tick(share: Fraction) -> str:
    return str(share.numerator) if share.denominator == 1 else str(share)

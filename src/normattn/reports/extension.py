"""The report of `normattn extend`: table.md, table.csv, reading.csv, the figures and an advice."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from normattn.atomic import write_text
from normattn.reports.cells import RowKey
from normattn.reports.extension_advice import Advice, advise, name_of, spoken
from normattn.reports.extension_cells import LAST_ACCURACY, LAST_LOSS, TRAIN_LOSS, Readings
from normattn.reports.extension_records import AS_IS, AnyUnit
from normattn.reports.markdown import FEW, few_note, grid, shown
from normattn.reports.metrics import Estimate
from normattn.reports.reading import reading_lines, readings

_MEASURED = (
    "Seconds: the decoder over one whole window without a cache and without the head, the median "
    "over windows. Memory: the most that the process grew beyond what it held with the model "
    "loaded, of all windows."
)
_KEYS = (
    " A pass key of five digits is stated in each window, at a depth of its own, and asked for at "
    "the end; it is found where greedy decoding would give every digit."
)


def extension_report(units: Sequence[AnyUnit], settings: Mapping[str, Any], out: Path) -> Advice:
    """Write the tables and the figures of what was read into `out`; return what is advised.

    `settings` are those of the run directory. The same units give the same bytes.
    """
    found = Readings(units, settings["windows"])
    lengths = sorted({*settings["lengths"], settings["train_length"]})
    advice = advise(found, lengths)
    write_text(out / "table.md", _markdown(found, settings, lengths, advice))
    write_text(out / "table.csv", _csv(_HEAD, _lines(found, lengths)))
    by_position = readings(found.cells, found.bootstrap)
    write_text(out / "reading.csv", _csv(*reading_lines(by_position)))
    if found.rows:
        # matplotlib is slow to import and not needed for the tables.
        from normattn.reports.figures.extension import draw_last_segment
        from normattn.reports.figures.reading import draw_readings

        draw_readings(by_position, out / "figures", subject="Text that was given")
        draw_last_segment(found, lengths, out / "figures")
    return advice


def _markdown(
    found: Readings, settings: Mapping[str, Any], lengths: Sequence[int], advice: Advice
) -> str:
    segment, windows = settings["segment"], settings["windows"]
    few = few_note("windows") if windows < FEW else ""
    parts = [
        f"# Reading past the training length: {Path(settings['gguf'] or settings['model']).name}",
        f"Trained to read {settings['train_length']:,} tokens; {settings['dtype']} weights; no "
        f"training. Text: {', '.join(Path(text).name for text in settings['text'])}, {windows} "
        f"windows of {settings['lengths'][-1]:,} tokens. {found.bootstrap.level:.0%} intervals "
        f"from {found.bootstrap.resamples} bootstrap resamples of the windows.{few}",
        "\n".join(f"- {sentence}" for sentence in advice.sentences),
        f"## Loss on the same last {segment:,} tokens, by length of the context (nats)",
        _by_length(found, lengths, lambda r, n: shown(found.value(r, LAST_LOSS, n), digits=3)),
        "## Its difference from the model as it is (nats, paired over windows; below 0 is better)",
        _by_length(
            found,
            lengths,
            lambda r, n: shown(
                found.against(r, found.plain, LAST_LOSS, n) if r.method else None, True, 3
            ),
        ),
        f"## Accuracy on the same last {segment:,} tokens (%)",
        _by_length(found, lengths, lambda r, n: shown(found.value(r, LAST_ACCURACY, n))),
        "## Loss by position at the longest length (nats)",
        _octaves(found),
        f"## What it costs at the training length of {settings['train_length']:,} tokens",
        _taxes(found, settings["train_length"]),
        "## Seconds of a prefill, peak memory, pass keys found",
        _costs(found, lengths),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _by_length(found: Readings, lengths: Sequence[int], cell: Callable[[RowKey, int], str]) -> str:
    head = ("method", *map(spoken, lengths))
    return grid(head, [(_name(row), *(cell(row, n) for n in lengths)) for row in found.rows])


def _octaves(found: Readings) -> str:
    curves = readings(found.cells, found.bootstrap, octaves=True)
    if not curves:
        return ""
    head = ("method", *(f"{point.first:,} to {point.last:,}" for point in curves[0].loss))
    points = [(_name(each.row), *(f"{point.value:.3f}" for point in each.loss)) for each in curves]
    return grid(head, points)


def _taxes(found: Readings, length: int) -> str:
    lines = []
    for row in found.rows:
        loss, tax = found.value(row, TRAIN_LOSS, length), found.tax(row)
        lines.append((_name(row), shown(loss, digits=3), shown(tax, signed=True, digits=2)))
    return grid(("method", "loss, nats", "more than as it is, %"), lines)


def _costs(found: Readings, lengths: Sequence[int]) -> str:
    def cell(row: RowKey, length: int) -> str:
        cost = found.costs.get((row, length))
        if cost is None:
            return "–"
        memory = "" if cost.peak_bytes is None else f", {cost.peak_bytes / 2**20:,.0f} MiB"
        key = f", {cost.found} of {cost.asked}" if cost.asked else ""
        return f"{cost.prefill_seconds:.1f} s{memory}{key}"

    words = _MEASURED + _KEYS * any(cost.asked for cost in found.costs.values())
    return f"{_by_length(found, lengths, cell)}\n\n{words}"


def _name(row: RowKey) -> str:
    return name_of(row) if row.method else AS_IS


_HEAD = ("method", "asked", "statistic", "length", "value", "low", "high", "windows", "tokens")


def _lines(found: Readings, lengths: Sequence[int]) -> list[tuple[Any, ...]]:
    lines: list[tuple[Any, ...]] = []
    for row in found.rows:
        start = (row.spec, found.methods[row])
        for length in lengths:
            plain = found.plain if row.method else None
            values: dict[str, Estimate | None] = {
                "last segment: loss": found.value(row, LAST_LOSS, length),
                "last segment: accuracy, %": found.value(row, LAST_ACCURACY, length),
                "last segment: loss, difference": found.against(row, plain, LAST_LOSS, length),
            }
            if length == row.train_length:
                values["training length: loss"] = found.value(row, TRAIN_LOSS, length)
                values["training length: tax, %"] = found.tax(row)
            for name, value in values.items():
                if value is not None:
                    ends = (value.value, value.low, value.high, value.documents, value.tokens)
                    lines.append((*start, name, length, *ends))
            lines += [(*start, *line) for line in _measured(found, row, length)]
    return lines


def _measured(found: Readings, row: RowKey, length: int) -> list[tuple[Any, ...]]:
    cost = found.costs.get((row, length))
    if cost is None:
        return []
    values: dict[str, float | None] = {
        "prefill, seconds": cost.prefill_seconds,
        "peak memory, bytes": cost.peak_bytes,
        "pass keys found": cost.found if cost.asked else None,
        "pass keys asked": cost.asked or None,
    }
    return [
        (name, length, value, None, None, None, None)
        for name, value in values.items()
        if value is not None
    ]


def _csv(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(["" if value is None else value for value in line] for line in lines)
    return text.getvalue()

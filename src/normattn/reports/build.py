"""One call from records to everything a reader gets: tables, numbers behind curves, figures."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from normattn.atomic import write_text
from normattn.errors import InputError
from normattn.reports.bootstrap import Bootstrap
from normattn.reports.cells import Cells
from normattn.reports.curves import Curve, curves_by_length, curves_by_position
from normattn.reports.markdown import markdown
from normattn.reports.reading import PROTOCOL as BY_POSITION
from normattn.reports.reading import Reading, reading_lines, reading_markdown, readings
from normattn.reports.records import AnyRecord, Record, parse_any
from normattn.reports.retrieval import (
    RetrievalCell,
    retrieval_cells,
    retrieval_lines,
    retrieval_markdown,
)
from normattn.reports.retrieval_record import RetrievalRecord
from normattn.reports.table import KEYS, Divergence, Row, table_rows


@dataclass(frozen=True)
class ReportPaths:
    """The files that `build` wrote; `more` are those of reading on and of retrieval."""

    markdown: Path
    csv: Path
    json: Path
    by_position: Path
    by_length: Path
    figures: tuple[Path, ...] = ()
    more: tuple[Path, ...] = ()


def build(
    records: Iterable[AnyRecord | Mapping[str, Any]],
    out: Path,
    diverged: Sequence[Divergence | Mapping[str, Any]] = (),
    figures: bool = True,
    bootstrap: Bootstrap | None = None,
) -> ReportPaths:
    """Write table.md, table.csv, table.json, the curves' numbers and figures/ into `out`.

    `records` are records or mappings read from record files, in any order; `diverged` are
    training runs that stopped with a loss that was not finite (see `Divergence`). Records by
    position also give reading.md and reading.csv, those of retrieval retrieval.md and
    retrieval.csv. The same records give the same bytes: nothing written holds a date, a time or a
    path. Raises `InputError` when there is nothing to report or a record is damaged.
    """
    drawn = bootstrap or Bootstrap()
    tabled, by_position, retrieval = _by_kind(records)
    cells = Cells(tabled)
    rows = table_rows(cells, diverged, drawn)
    if not (rows or by_position or retrieval):
        raise InputError("there is nothing to report: no evaluation record was found")
    positions, lengths = curves_by_position(cells, drawn), curves_by_length(cells, drawn)
    paths = ReportPaths(
        markdown=out / "table.md",
        csv=out / "table.csv",
        json=out / "table.json",
        by_position=out / "by_position.csv",
        by_length=out / "by_length.csv",
    )
    more = _More.of(by_position, retrieval, drawn)
    write_text(paths.markdown, markdown(rows, cells, drawn, more.pages))
    write_text(paths.csv, table_csv(rows))
    write_text(paths.json, table_json(rows))
    write_text(paths.by_position, curves_csv(positions))
    write_text(paths.by_length, curves_csv(lengths))
    paths = replace(paths, more=more.write(out, drawn))
    if not figures:
        return paths
    # matplotlib is slow to import and not needed for the tables.
    from normattn.reports.figures import draw_figures, draw_readings, draw_retrieval

    folder = out / "figures"
    drawn_paths = draw_figures(rows, positions, lengths, folder)
    drawn_paths += draw_readings(more.readings, folder) + draw_retrieval(more.retrieval, folder)
    return replace(paths, figures=tuple(drawn_paths))


def _by_kind(
    records: Iterable[AnyRecord | Mapping[str, Any]],
) -> tuple[list[Record], list[Record], list[RetrievalRecord]]:
    """Records of the table, those by position, those of retrieval."""
    tabled: list[Record] = []
    by_position: list[Record] = []
    retrieval: list[RetrievalRecord] = []
    for index, value in enumerate(records):
        record = parse_any(value, f"record {index}")
        if isinstance(record, RetrievalRecord):
            retrieval.append(record)
        else:
            (by_position if record.protocol == BY_POSITION else tabled).append(record)
    return tabled, by_position, retrieval


@dataclass(frozen=True)
class _More:
    """What is reported beside the table: reading on (in fine bins and in octaves), retrieval."""

    readings: list[Reading]
    octaves: list[Reading]
    retrieval: list[RetrievalCell]

    @classmethod
    def of(
        cls,
        by_position: Sequence[Record],
        retrieval: Sequence[RetrievalRecord],
        bootstrap: Bootstrap,
    ) -> _More:
        cells = Cells(by_position)
        return cls(
            readings(cells, bootstrap),
            readings(cells, bootstrap, octaves=True),
            retrieval_cells(retrieval, bootstrap),
        )

    @property
    def pages(self) -> dict[str, str]:
        """The pages to be named in table.md, and what each holds."""
        pages = {}
        if self.readings:
            pages["reading.md"] = "accuracy and loss by position, past the training length"
        if self.retrieval:
            pages["retrieval.md"] = "facts stated in a long text and asked for at its end"
        return pages

    def write(self, out: Path, bootstrap: Bootstrap) -> tuple[Path, ...]:
        texts: dict[str, str] = {}
        if self.readings:
            texts["reading.md"] = reading_markdown(self.octaves, bootstrap)
            texts["reading.csv"] = _csv(*reading_lines(self.readings))
        if self.retrieval:
            texts["retrieval.md"] = retrieval_markdown(self.retrieval, bootstrap)
            texts["retrieval.csv"] = _csv(*retrieval_lines(self.retrieval))
        for name, text in texts.items():
            write_text(out / name, text)
        return tuple(out / name for name in texts)


def table_json(rows: Sequence[Row]) -> str:
    """table.json: a list of row objects."""
    value = [row.as_json() for row in rows]
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def table_csv(rows: Sequence[Row]) -> str:
    """table.csv: for each metric its value, low, high, documents, tokens and seeds."""
    fields = ("value", "low", "high", "documents", "tokens", "seeds")
    head = ["name", "variant", "method", "spec", "train_length"]
    head += [f"{key}_{field}".removesuffix("_value") for key in KEYS for field in fields]
    head += ["diverged_step", "diverged_where"]
    lines = []
    for row in rows:
        key = row.key
        line: list[Any] = [key.name, key.variant, key.method, key.spec, key.train_length]
        for name in KEYS:
            value = row.metrics[name]
            line += [""] * len(fields) if value is None else value.as_json().values()
        first = row.diverged[0] if row.diverged else None
        line += ["", ""] if first is None else [first.step, first.where]
        lines.append(line)
    return _csv(head, lines)


def curves_csv(curves: Sequence[Curve]) -> str:
    """The numbers behind a figure, one point a line."""
    head = ["name", "variant", "method", "protocol", "train_length", "from", "to"]
    head += ["accuracy", "low", "high"]
    lines = [
        [
            *(curve.name, curve.variant, curve.method, curve.protocol, curve.train_length),
            *(point.first, point.last, point.value, point.low, point.high),
        ]
        for curve in curves
        for point in curve.points
    ]
    return _csv(head, lines)


def _csv(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(["" if value is None else value for value in line] for line in lines)
    return text.getvalue()

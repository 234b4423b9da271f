"""`normattn report`: tables and figures of whatever was measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from normattn.cli.asking import argument, option

EPILOG = """
**Examples**

`normattn report runs/kna runs/baseline --out runs/report`

`normattn report wide=runs/a narrow=runs/b --out runs/widths` – two trainings of one score

`normattn report runs/keynorm-laptop` – tabulate a sweep again, into its own directory

`normattn report results/keynorm-workstation --out again` – every page again, from its frame alone

`normattn report runs/seeds-0-1 runs/seeds-2-4 --out runs/all` – one study, trained in two places

`normattn report runs/extend-a runs/extend-b --out gallery` – models and texts of `normattn extend`
"""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Make the page (table.md, report.html, figures) of everything that was measured below RUNS.

    Rows that share documents and seeds are compared in pairs, with confidence intervals. A folder
    that holds measurements.parquet needs nothing else: every number is computed from it again.
    Folders of one study that hold other rows or seeds are joined; their settings must be the same.
    Runs of one row are its seeds; name runs that were trained differently, as LABEL=RUN.
    """

    runs: list[str] = argument(
        metavar="[LABEL=]RUN",
        help="Runs, directories with runs below them, or a folder with measurements.parquet. "
        "LABEL names the row of a run.",
    )
    out: Path | None = option(
        None, help="Where table.md, .csv, .json and figures/ go. [default: the first RUN]"
    )
    study: str | None = option(
        None, help="The FILE.py of a study of your own. [default: what RUN names]"
    )

"""Draw docs/keynorm.png, the README's figure: accuracy by position of unmodified models.

    python scripts/front_figure.py

It uses only the published measurements of `results/keynorm-base`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from normattn.lab.report.charts import png
from normattn.lab.report.figures import Curves
from normattn.lab.report.page import context
from normattn.lab.stats import measurements
from normattn.lab.studies import find

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "results" / "keynorm-base"
LABELS = {
    "Baseline": "plain RoPE",
    "KNA": "KeyNorm",
    "Baseline-StreamingLLM": "plain RoPE with StreamingLLM",
}


def figure() -> Curves:
    """The panel of the unmodified models, with names that need no explanation."""
    page = context(find("keynorm").page, measurements.read(FOLDER / measurements.FILE))
    curves = next(
        candidate
        for candidate in page.figures
        if candidate.name == "accuracy_by_position_non_repeated"
    )
    assert isinstance(curves, Curves)
    panel = curves.panels[0]
    lines = tuple(
        replace(line, label=LABELS[line.label], family=LABELS[line.label])
        for line in panel.lines
        if line.label in LABELS
    )
    shown = replace(panel, title="", lines=lines, x_title="position in the text")
    title = "Accuracy by position: held-out text, six layers, trained at 128 tokens"
    return Curves("keynorm", title, (shown,), first=tuple(LABELS.values()))


def main() -> None:
    """Write the figure."""
    (ROOT / "docs" / "keynorm.png").write_bytes(png(figure()))


if __name__ == "__main__":
    main()

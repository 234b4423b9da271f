"""Draw docs/keynorm-post.png: the 32 rows of the KeyNorm post, here against the post.

    python scripts/post_figure.py

It uses only the published table of `results/keynorm-base`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from normattn.lab.report.charts import COLOURS
from normattn.lab.studies.keynorm import METHODS
from normattn.lab.studies.lm_report import FAMILIES
from normattn.score.spec import UNMODIFIED

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "results" / "keynorm-base" / "table.json"
TEXTS = {"repeated": "repeated text", "non_repeated": "held-out text"}


def points(text: str) -> Iterator[dict[str, Any]]:
    """A point for each row: the accuracy in the post and here."""
    table = json.loads(TABLE.read_text("utf-8"))["tables"]["source"]
    rows = {row["row"]: row for row in table}
    for family, logn, method in product(FAMILIES, ("", "-logn"), METHODS):
        row = rows[f"{family}{logn}" + (f"-{method}" if method != UNMODIFIED else "")]
        accuracies = {"post": float(row[f"{text}_source"]), "here": row[text]["value"]}
        yield {**accuracies, "score": family, "method": method}


def panel(text: str) -> Any:
    """The points of one kind of text, and the line of equal accuracy."""
    values = list(points(text))
    ends = [value[axis] for value in values for axis in ("post", "here")]
    scale = alt.Scale(domain=[min(ends) - 3, max(ends) + 3], nice=False, zero=False)
    equal = [{"post": end, "here": end} for end in (min(ends) - 3, max(ends) + 3)]
    x = alt.X("post:Q", title="the post, %", scale=scale)
    y = alt.Y("here:Q", title="here, %", scale=scale)
    line = alt.Chart(_data(equal)).mark_line(color="#a0a0a0", strokeDash=[4, 4], size=1)
    dots = alt.Chart(_data(values)).mark_point(size=70, filled=True, opacity=0.85)
    coloured = dots.encode(
        x=x,
        y=y,
        color=alt.Color(
            "score:N", scale=alt.Scale(domain=FAMILIES, range=COLOURS[: len(FAMILIES)])
        ),
        shape=alt.Shape("method:N", sort=METHODS, scale=alt.Scale(domain=METHODS)),
    )
    chart: Any = alt.layer(line.encode(x=x, y=y), coloured)
    return chart.properties(width=280, height=280, title=TEXTS[text])


def _data(values: list[dict[str, Any]]) -> Any:
    data: Any = alt.Data
    return data(values=values)


def main() -> None:
    """Write the figure."""
    title = "Accuracy at 8 times the training length: eight scores, with and without methods"
    chart = alt.hconcat(*(panel(text) for text in TEXTS), title=title)
    image: bytes = vl_convert.vegalite_to_png(chart.to_dict(), scale=2)
    (ROOT / "docs" / "keynorm-post.png").write_bytes(image)


if __name__ == "__main__":
    main()

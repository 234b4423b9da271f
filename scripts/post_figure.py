"""Draw docs/keynorm-post.png: the 32 rows of the KeyNorm post, here against the post.

    python scripts/post_figure.py

It uses only the published table of `results/keynorm-base`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "results" / "keynorm-base" / "table.json"
TEXTS = {"repeated": "repeated text", "non_repeated": "held-out text"}
METHODS = ("unmodified", "NTK", "YaRN", "ReRoPE")
NAME = re.compile(r"(\w+?)(-logn)?(?:-(NTK|YaRN|ReRoPE))?")
COLOURS = {"Baseline": "#000000", "QNA": "#e69f00", "KNA": "#0072b2", "CosA": "#009e73"}


def points(text: str) -> Iterator[dict[str, Any]]:
    """A point for each row: the accuracy in the post and here."""
    for row in json.loads(TABLE.read_text("utf-8"))["tables"]["source"]:
        match = NAME.fullmatch(row["row"])
        assert match is not None
        family, _, method = match.groups()
        yield {
            "post": float(row[f"{text}_source"]),
            "here": row[text]["value"],
            "score": family,
            "method": method or "unmodified",
        }


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
        color=alt.Color("score:N", scale=alt.Scale(domain=[*COLOURS], range=[*COLOURS.values()])),
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

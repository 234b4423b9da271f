"""The README's table of the source's architecture is what was published of it."""

from __future__ import annotations

from collections.abc import Mapping

from normattn.studies.keynorm import METHODS, VARIANTS
from normattn.sweep.reading import AS_IS

from .test_quick import README, interval, name, points, rows

FOLDER = "keynorm-workstation"
CONTROLS = ("Baseline-SlidingWindow", "Baseline-StreamingLLM", "KNA-NoPE")


def table() -> list[str]:
    """A line for every score and control: as it is, and the change that methods leave."""
    published = rows(FOLDER)
    return [line(row, published) for row in (*VARIANTS, *CONTROLS)]


def line(row: str, published: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    own = published[row]
    methods = [published.get(name(row, method)) for method in METHODS if method != AS_IS]
    low, high = (f"{own['train'][end]:.1f}" for end in ("low", "high"))
    cells = [
        f"`{row}`",
        f"{own['train']['value']:.1f} [{low}, {high}]",
        f"{own['repeated_seen']['value']:.1f}",
        f"{own['non_repeated']['value']:.1f}",
        interval(own["change"]),
        *("–" if method is None else points(method["change"]["value"]) for method in methods),
    ]
    return f"| {' | '.join(cells)} |"


def test_the_readme_has_every_row_of_the_workstation() -> None:
    header = "| trained as | at L | tiled, seen, 8 L | natural, 8 L | change, as it is |"
    above, below = README.split(header)
    assert below.splitlines()[2:][: len(VARIANTS) + len(CONTROLS)] == table()
    assert "normattn report results/keynorm-workstation --out again" in above + below

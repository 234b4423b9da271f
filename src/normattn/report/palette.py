"""The colours that the images and the HTML page share.

Okabe and Ito's palette, which colour-blind readers tell apart, without its yellow, which is too pale
for lines; and viridis, whose lightness rises with the value, for cells.
"""

from __future__ import annotations

from collections.abc import Iterable

LINES = (
    *("#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#CC79A7"),
    *("#56B4E9", "#8C6D31", "#7F7F7F", "#332288", "#44AA99", "#AA4466"),
)
"""The colours of families, in the order in which a figure first shows them."""

CELLS = (
    *("#440154", "#472D7B", "#3B528B", "#2C728E", "#21918C"),
    *("#28AE80", "#5EC962", "#ADDC30", "#FDE725"),
)
"""Evenly spaced colours from the lowest value to the highest."""


def ranked(families: Iterable[str]) -> dict[str, int]:
    """Each family's place among the colours; more families than colours begin again."""
    return {name: place for place, name in enumerate(dict.fromkeys(families))}

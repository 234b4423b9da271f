"""The colours that the images and the HTML page share.

Okabe and Ito's palette, which colour-blind readers tell apart, without its yellow, which is too
pale for lines; and viridis, whose lightness rises with the value, for cells.
"""

from __future__ import annotations

from collections.abc import Iterable

LINES = (
    *("#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#CC79A7"),
    *("#56B4E9", "#8C6D31", "#7F7F7F", "#332288", "#44AA99", "#AA4466"),
)
"""The colours of families, in the order in which a figure first shows them."""

ON_DARK = (
    *("#F2F2F2", "#E69F00", "#4C9BE0", "#1DBE93", "#F08048", "#E39AC4"),
    *("#A6DCFF", "#BF9C58", "#A3A3A3", "#9C8FF0", "#7FD8CB", "#E08A9C"),
)
"""The same hues on a dark ground."""

CELLS = (
    *("#440154", "#472D7B", "#3B528B", "#2C728E", "#21918C"),
    *("#28AE80", "#5EC962", "#ADDC30", "#FDE725"),
)
"""Evenly spaced colours from the lowest value to the highest."""


def line_colour(position: int) -> int:
    """Which of `LINES` the family at this place has; when they begin again, the first is left out.

    The first is what all others are held against, such as the model as it is.
    """
    count = len(LINES)
    return position if position < count else 1 + (position - count) % (count - 1)


def ranked(families: Iterable[str], first: Iterable[str] = ()) -> dict[str, int]:
    """Each family's place: of `first`, named or not, then in the order in which they are named."""
    return {name: position for position, name in enumerate(dict.fromkeys((*first, *families)))}

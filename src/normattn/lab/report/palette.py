"""The colours of lines: Okabe and Ito's palette, which colour-blind readers tell apart.

Its yellow is left out: it is too pale for lines.
"""

from __future__ import annotations

from collections.abc import Iterable

LINES = (
    *("#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#CC79A7"),
    *("#56B4E9", "#8C6D31", "#7F7F7F", "#332288", "#44AA99", "#AA4466"),
)
"""The colours of families, in the order in which a figure first shows them."""


def line_colour(position: int) -> int:
    """Which of `LINES` the family at this place has; when they begin again, the first is left out.

    The first is what all others are held against, such as the model as it is.
    """
    count = len(LINES)
    return position if position < count else 1 + (position - count) % (count - 1)


def ranked(families: Iterable[str], first: Iterable[str] = ()) -> dict[str, int]:
    """Each family's place: of `first`, named or not, then in the order in which they are named."""
    return {name: position for position, name in enumerate(dict.fromkeys((*first, *families)))}

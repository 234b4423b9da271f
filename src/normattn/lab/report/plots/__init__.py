"""Figures as images: `draw(figure)` gives the bytes of a PNG file.

Importing this does not import matplotlib; drawing does.
"""

from __future__ import annotations

from normattn.lab.report.figure import Curves, Density, Figure, Grid, Intervals


def draw(figure: Figure) -> bytes:
    """The image of a figure: equal figures give equal bytes, in any process."""
    # matplotlib takes half a second to import, and few commands draw.
    from normattn.lab.report.plots import curves, density, grid, intervals
    from normattn.lab.report.plots.style import house_style, rendered

    with house_style():
        match figure:
            case Curves():
                drawn = curves.plot(figure)
            case Intervals():
                drawn = intervals.plot(figure)
            case Grid():
                drawn = grid.plot(figure)
            case Density():
                drawn = density.plot(figure)
        return rendered(drawn)

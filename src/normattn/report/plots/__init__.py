"""Figures as images: `draw(figure)` gives the bytes of a PNG or SVG file.

Importing this does not import matplotlib; drawing does.
"""

from normattn.report.plots.draw import Format, draw

__all__ = ["Format", "draw"]

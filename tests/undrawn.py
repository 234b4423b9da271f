"""Reports without charts, which take most of their time; tests/report draws every kind."""

from __future__ import annotations

import pytest


def undraw(patch: pytest.MonkeyPatch) -> None:
    """From now on a report has the files of its figures and the rest of its page, undrawn."""
    patch.setattr("normattn.lab.report.charts.png", lambda figure: b"not drawn here")
    patch.setattr("normattn.lab.report.charts.vega_lite", lambda figure: {})
    patch.setattr("normattn.lab.report.output._vega", lambda: "")

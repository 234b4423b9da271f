"""Parameters of which a few are tested each time, and all with `--thorough`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def few(values: Iterable[Any], always: Callable[[Any], bool]) -> list[Any]:
    """Every value; those that are not tested always carry the mark `thorough`."""
    return [
        value if always(value) else pytest.param(value, marks=pytest.mark.thorough)
        for value in values
    ]

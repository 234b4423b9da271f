"""Every suite by its name; a suite is one file: cases and goals as data."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from normattn.bench.case import Suite
from normattn.errors import unknown

_NAMES = (
    *("folded", "two_regime", "plain", "tiles", "bias", "decode", "cross_entropy"),
    *("norms", "preset_step", "scoring", "train_step", "realformer"),
    *("diagnostics", "extend", "memory"),
)
"""The modules beside this one, in the order in which they are measured."""
_SUITES = (import_module(f"{__name__}.{name}").SUITE for name in _NAMES)
SUITES: dict[str, Suite] = {suite.name: suite for suite in _SUITES}


def chosen(names: Sequence[str]) -> list[Suite]:
    """The suites of these names in their own order, all of them for none.

    Raises `InputError` for an unknown name, with the nearest ones.
    """
    for name in names:
        if name not in SUITES:
            raise unknown("benchmark suite", name, SUITES)
    return [suite for name, suite in SUITES.items() if not names or name in names]

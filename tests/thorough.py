"""Parameters of which a few are tested each time, and all with `--thorough`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from normattn.lab.stats import measurements


def few(values: Iterable[Any], always: Callable[[Any], bool]) -> list[Any]:
    """Every value; those that are not tested always carry the mark `thorough`.

    A tuple holds the values of several arguments.
    """
    return [value if always(value) else _marked(value) for value in values]


def half_of(one: Sequence[Any], other: Sequence[Any]) -> list[Any]:
    """Every pair; each value of the one is tested always with every second value of the other."""
    pairs = [(n + m, (a, b)) for n, a in enumerate(one) for m, b in enumerate(other)]
    return [_marked(pair) if number % 2 else pair for number, pair in pairs]


def _marked(value: Any) -> Any:
    each = value if isinstance(value, tuple) else (value,)
    return pytest.param(*each, marks=pytest.mark.thorough)


def smallest_of_each_study(folders: Iterable[Path]) -> set[Path]:
    """Of the published folders of each study the one with the fewest numbers, made of the least."""

    def size(folder: Path) -> tuple[int, int]:
        numbers, measured = (
            (folder / name).stat().st_size for name in ("table.json", measurements.FILE)
        )
        return numbers // 1000, measured

    def study(folder: Path) -> Any:
        return json.loads((folder / "config.json").read_text())["kind"]

    return {*{study(each): each for each in sorted(folders, key=size, reverse=True)}.values()}

"""The studies: each is a `STUDY = Study("name", "question", …)` in a file of this folder.

That line registers the study. A user's study is given by the path of its file, on the command line
only (`normattn reproduce ./my_study.py`): a name read from a file never runs code.
"""

from __future__ import annotations

import ast
import importlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

from normattn.errors import unknown_name

if TYPE_CHECKING:
    from normattn.lab.studies.base import Study

COMMAND_STUDIES = ("extend", "gallery", "inspect")
"""Studies that the commands of these names measure; `names` does not list them."""


def names() -> list[str]:
    """Return the sorted names of the package's studies, without importing them."""
    return sorted(name for name in _found() if name not in COMMAND_STUDIES)


def summary(name: str) -> str:
    """Return the question of a study, without importing its file."""
    return _found()[name][0]


def find(name: str) -> Study:
    """Return the registered study called `name`, which may come from a file.

    Raises `InputError`, with the nearest name, for any other text: paths are not followed.
    """
    if name not in _found():
        hint = "; your own study is given by its file: reproduce FILE.py, report --study FILE.py"
        raise unknown_name("study", name, names(), hint)
    _, module, variable = _found()[name]
    return cast("Study", getattr(importlib.import_module(f"{__name__}.{module}"), variable))


def find_typed(name: str) -> Study:
    """Return the study that a command line names: registered, or the file at a path FILE.py.

    A file is imported, which runs it: pass only what the user typed, never a name read from a file.
    Raises `InputError` for an unknown name and for a file that defines no study.
    """
    if not name.endswith(".py"):
        return find(name)
    from normattn.lab.studies.base import load

    return load(Path(name))


@cache
def _found() -> dict[str, tuple[str, str, str]]:
    """(question, module, variable) of each `NAME = Study("name", "question", …)` in this folder."""
    locations = {}
    for file in sorted(Path(__file__).parent.glob("*.py")):
        text = file.read_text("utf-8")
        for line in ast.parse(text).body if " = Study(" in text else ():
            match line:
                case ast.Assign([ast.Name(variable)], ast.Call(ast.Name("Study"), [*args])):
                    name, question = map(ast.literal_eval, args[:2])
                    locations[name] = question, file.stem, variable
    return locations

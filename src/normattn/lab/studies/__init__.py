"""The experiments; a new study is one new file that says `STUDY = Study("name", "question", …)`.

A study is found by that line, in any file of this folder: nothing else has to be edited. Your own
study is named by the path of its file, on the command line alone (`normattn reproduce
./my_study.py`): a name that was read from a file never runs code.
"""

from __future__ import annotations

import ast
import importlib
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from normattn.errors import unknown_name

if TYPE_CHECKING:
    from normattn.lab.studies.base import Study

OF_COMMANDS = ("extend", "gallery", "inspect")
"""Measured by commands of these names; here they are pages only, found but not listed."""


class _Place(NamedTuple):
    """Where a study is, and its question."""

    module: str
    variable: str
    question: str


def names() -> list[str]:
    """The studies of the library, in the order of their names; none of them is imported."""
    return sorted(name for name in _found() if name not in OF_COMMANDS)


def summary(name: str) -> str:
    """What a study asks; its file is not imported."""
    return _found()[name].question


def find(name: str) -> Study:
    """Return the registered study of this name; the name may come from a file.

    Raises `InputError`, with the nearest name, for any other text: a path is never followed.
    """
    place = _found().get(name)
    if place is None:
        own = (
            "; a study of your own is given by its file: reproduce FILE.py, report --study FILE.py"
        )
        raise unknown_name("study", name, names(), own)
    module = importlib.import_module(f"{__name__}.{place.module}")
    return cast("Study", getattr(module, place.variable))


def find_typed(name: str) -> Study:
    """Return the study that a command line names: registered, or the file at a path FILE.py.

    A file is imported, which runs it. Pass only what the user typed, never a text from a file.
    Raises `InputError` for an unknown name and for a file that holds no study.
    """
    if not name.endswith(".py"):
        return find(name)
    from normattn.lab.studies._user_file import load

    return load(Path(name))


def errors_in(study: Study) -> AbstractContextManager[None]:
    """Raise what fails in a user's study file as an `InputError` that names file and line."""
    if study.source is None:
        return nullcontext()
    from normattn.lab.studies._user_file import errors_of

    return errors_of(study.source)


@cache
def _found() -> dict[str, _Place]:
    """Every `NAME = Study("name", "question", …)` at the top of a file of this folder."""
    found = {}
    for file in sorted(Path(__file__).parent.glob("*.py")):
        text = file.read_text("utf-8")
        for line in ast.parse(text).body if " = Study(" in text else ():
            match line:
                case ast.Assign([ast.Name(variable)], ast.Call(ast.Name("Study"), [*given])):
                    name, question = map(ast.literal_eval, given[:2])
                    found[name] = _Place(file.stem, variable, question)
    return found

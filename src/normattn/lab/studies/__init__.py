"""The experiments, one file each; a new study is one new file that says `STUDY = Study(…)`.

A study is found by the name of its file: nothing else has to be edited. A study of your own is
named by the path of its file, on the command line alone (`normattn reproduce ./my_study.py`): a
name that was read from a file never runs code.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, cast

from normattn.errors import unknown

if TYPE_CHECKING:
    from normattn.lab.sweep.study import Study

_SHARED = ("base", "premise")
"""Files that studies share."""
OF_COMMANDS = ("extend", "gallery", "inspect")
"""Measured by commands of these names; here they are pages only, found but not listed."""


def names() -> list[str]:
    """The studies of the library, in the order of their names; none of them is imported."""
    return sorted(
        module.name.rstrip("_")
        for module in pkgutil.iter_modules(__path__)
        if module.name[0] != "_" and module.name not in (*OF_COMMANDS, *_SHARED)
    )


def summary(name: str) -> str:
    """What a study asks: the first line of its file, which is not imported."""
    source = next(Path(folder) / f"{_module(name)}.py" for folder in __path__)
    if not source.exists():
        source = source.with_suffix("") / "__init__.py"
    text = ast.get_docstring(ast.parse(source.read_text("utf-8"))) or name
    return text.splitlines()[0]


def find(name: str) -> Study:
    """Return the registered study of this name; the name may come from a file.

    Raises `InputError`, with the nearest name, for any other text: a path is never followed.
    """
    if name not in (*names(), *OF_COMMANDS):
        own = "; give a study of your own on the command line, by the path of its file"
        raise unknown("study", name, names(), own)
    module = importlib.import_module(f"{__name__}.{_module(name)}")
    return cast("Study", module.STUDY)


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


def _module(name: str) -> str:
    """`continue` is a word of Python: its file has an underscore at its end."""
    modules = {module.name.rstrip("_"): module.name for module in pkgutil.iter_modules(__path__)}
    return modules[name]

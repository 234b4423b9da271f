"""The experiments, one file each; a new study is one new file that says `STUDY = Study(…)`.

A study is found by the name of its file: nothing else has to be edited. One of your own is found
by the path of its file (`normattn reproduce ./my_study.py`).
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING, cast

from normattn.errors import InputError, unknown

if TYPE_CHECKING:
    from normattn.lab.sweep.study import Study

_NOT_STUDIES = "_"
OF_COMMANDS = ("extend", "gallery", "inspect")
"""Measured by commands of these names; here they are pages only, found but not listed."""


def names() -> list[str]:
    """The studies of the library, in the order of their names; none of them is imported."""
    return sorted(
        module.name.rstrip("_")
        for module in pkgutil.iter_modules(__path__)
        if not module.name.startswith(_NOT_STUDIES) and module.name not in OF_COMMANDS
    )


def summary(name: str) -> str:
    """What a study asks: the first line of its file, which is not imported."""
    source = next(Path(folder) / f"{_module(name)}.py" for folder in __path__)
    if not source.exists():
        source = source.with_suffix("") / "__init__.py"
    text = ast.get_docstring(ast.parse(source.read_text("utf-8"))) or name
    return text.splitlines()[0]


def find(name: str) -> Study:
    """The study of a name, or of the file at a path; `InputError` names the nearest one."""
    if name.endswith(".py"):
        return _of_file(Path(name))
    if name not in (*names(), *OF_COMMANDS):
        own = ", and a file of your own by its path, ending in .py"
        raise unknown("study", name, names(), own)
    module = importlib.import_module(f"{__name__}.{_module(name)}")
    return cast("Study", module.STUDY)


def _module(name: str) -> str:
    """`continue` is a word of Python: its file has an underscore at its end."""
    modules = {module.name.rstrip("_"): module.name for module in pkgutil.iter_modules(__path__)}
    return modules[name]


def _of_file(path: Path) -> Study:
    from normattn.lab.sweep.study import Study

    if not path.is_file():
        raise InputError(f"the study {path} does not exist")
    made = importlib.util.spec_from_file_location(f"normattn_study_{path.stem}", path)
    assert made is not None
    assert made.loader is not None
    module = importlib.util.module_from_spec(made)
    try:
        made.loader.exec_module(module)
    except SyntaxError as error:
        raise InputError(f"{path} is no Python: line {error.lineno}: {error.msg}") from error
    study = getattr(module, "STUDY", None)
    if not isinstance(study, Study):
        raise InputError(f"{path} says no STUDY = Study(…)")
    return Study(**{**vars(study), "source": path})

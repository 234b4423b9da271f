"""A study in a file of the user: loading it, and errors in it as the user's own."""

from __future__ import annotations

import copy
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from normattn.errors import InputError, NormattnError
from normattn.lab.studies.base import Study
from normattn.stopping import asked_to_stop


def load(path: Path) -> Study:
    """Import the file at `path` and return its `STUDY`, which remembers the file as its source.

    It can import modules from its own folder, as a script can; installed modules come first.
    Raises `InputError` for a file that is missing, is no Python, fails, or holds no study.
    """
    if not path.is_file():
        raise InputError(f"the study {path} does not exist")
    found = importlib.util.spec_from_file_location(f"normattn_study_{path.stem}", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    with errors_of(path):
        found.loader.exec_module(module)
    study = getattr(module, "STUDY", None)
    if not isinstance(study, Study):
        raise InputError(f"{path} defines no STUDY = Study(…)")
    own = copy.copy(study)
    own.source = path
    return own


@contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Raise what fails in the study file at `path` as an `InputError` that names file and line.

    Its note holds the traceback from the user's first line on. An error that never passes through
    the file goes on as it came, and so do our own errors.
    """
    try:
        yield
    except (NormattnError, KeyboardInterrupt):
        raise
    except (Exception, SystemExit) as error:
        if asked_to_stop():
            raise
        frames = traceback.extract_tb(error.__traceback__)
        own = [n for n, f in enumerate(frames) if Path(f.filename).resolve() == path.resolve()]
        if isinstance(error, SyntaxError) and not own:
            raise InputError(
                f"{path} is not valid Python: line {error.lineno}: {error.msg}"
            ) from error
        if not own:
            raise
        reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        if isinstance(error, SystemExit):
            reason = "a study file must not end the process, and this one calls sys.exit"
        refused = InputError(f"{path}, line {frames[own[-1]].lineno}: {reason}")
        lines = traceback.format_list(frames[own[0] :]) + traceback.format_exception_only(error)
        refused.add_note("Traceback (most recent call last):\n" + "".join(lines).rstrip())
        raise refused from error

"""Load a study from the user's file, and report errors in it with file and line."""

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
    """Import the file at `path` and return its `STUDY`, with the file as its source.

    The file can import modules from its folder, as a script can; installed modules come first.
    Raises `InputError` for a file that is missing, is not Python, fails, or defines no study.
    """
    if not path.is_file():
        raise InputError(f"the study {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"normattn_study_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    with errors_of(path):
        spec.loader.exec_module(module)
    study = getattr(module, "STUDY", None)
    if not isinstance(study, Study):
        raise InputError(f"{path} defines no STUDY = Study(…)")
    loaded = copy.copy(study)
    loaded.source = path
    return loaded


@contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Turn an exception from the study file at `path` into an `InputError` with file and line.

    Its note holds the traceback from the first frame in that file. Errors of normattn, and errors
    that do not pass through the file, are raised unchanged.
    """
    try:
        yield
    except (NormattnError, KeyboardInterrupt):
        raise
    except (Exception, SystemExit) as error:
        if asked_to_stop():
            raise
        frames = traceback.extract_tb(error.__traceback__)
        in_file = [n for n, f in enumerate(frames) if Path(f.filename).resolve() == path.resolve()]
        if isinstance(error, SyntaxError) and not in_file:
            raise InputError(
                f"{path} is not valid Python: line {error.lineno}: {error.msg}"
            ) from error
        if not in_file:
            raise
        reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        if isinstance(error, SystemExit):
            reason = "a study file must not end the process, and this one calls sys.exit"
        reported = InputError(f"{path}, line {frames[in_file[-1]].lineno}: {reason}")
        lines = traceback.format_list(frames[in_file[0] :])
        lines += traceback.format_exception_only(error)
        reported.add_note("Traceback (most recent call last):\n" + "".join(lines).rstrip())
        raise reported from error

"""A study in a file of the user: loading it, and errors in it as the user's own."""

from __future__ import annotations

import copy
import importlib.util
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from normattn.errors import InputError, NormattnError
from normattn.lab.studies.base import Study
from normattn.stopping import asked_to_stop


def load(path: Path) -> Study:
    """Import the file at `path` and return its `STUDY`, which remembers the file as its source.

    Raises `InputError` for a file that is missing, is no Python, fails, or holds no study.
    """
    if not path.is_file():
        raise InputError(f"the study {path} does not exist")
    found = importlib.util.spec_from_file_location(f"normattn_study_{path.stem}", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
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
        own = _user_frames(error.__traceback__, path)
        if isinstance(error, SyntaxError) and own is None:
            raise InputError(f"{path} is no Python: line {error.lineno}: {error.msg}") from error
        if own is None:
            raise
        refused = InputError(f"{path}, line {_last_line(own, path)}: {_reason(error)}")
        shown = "".join(traceback.format_exception(type(error), error, own, chain=False))
        refused.add_note(shown.rstrip())
        raise refused from error


def _reason(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "a study file must not end the process, and this one calls sys.exit"
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _user_frames(trace: TracebackType | None, path: Path) -> TracebackType | None:
    """The traceback from the first frame in the file on; None where it has none."""
    while trace is not None and not _is_in(trace, path):
        trace = trace.tb_next
    return trace


def _last_line(trace: TracebackType, path: Path) -> int:
    """The line of the file that was running last."""
    line = trace.tb_lineno
    below = trace.tb_next
    while below is not None:
        line = below.tb_lineno if _is_in(below, path) else line
        below = below.tb_next
    return line


def _is_in(trace: TracebackType, path: Path) -> bool:
    return Path(trace.tb_frame.f_code.co_filename).resolve() == path.resolve()

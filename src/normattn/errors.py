"""Exceptions of the library. The command line prints their message without a traceback."""

from __future__ import annotations

import importlib
import importlib.util
import operator
import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class NormattnError(Exception):
    """Base class of the library's errors."""


_MAX_WORD, _MAX_MESSAGE = 320, 2000


class InputError(NormattnError, ValueError):
    """Bad input. The message says what was wrong, where, and what was expected.

    Words of more than 320 characters and messages of more than 2,000 are shortened in the middle.
    """

    def __str__(self) -> str:
        # Not in `__init__`, which torch.compile cannot trace.
        text = super().__str__()
        if len(text) > _MAX_WORD:
            text = re.sub(rf"\S{{{_MAX_WORD + 1},}}", lambda word: _shorten(word[0], 100), text)
        return _shorten(text, 900) if len(text) > _MAX_MESSAGE else text


def _shorten(text: str, ends: int) -> str:
    return f"{text[:ends]}… ({len(text):,} characters) …{text[-ends:]}"


class DivergedError(NormattnError):
    """A loss became NaN or infinite at optimiser step `step`.

    `where` is the module whose output was first not finite, `checkpoint` the last good one, if any.
    """

    def __init__(self, step: int, where: str, checkpoint: str | None) -> None:
        self.step = step
        self.where = where
        self.checkpoint = checkpoint
        last = f"the last good checkpoint is {checkpoint}" if checkpoint else "no checkpoint exists"
        super().__init__(f"the loss is not finite at step {step}; it began in {where}; {last}")


class Interrupted(NormattnError):
    """Work was stopped by a signal after its state was saved; rerun the command to resume."""


def require_sizes(owner: str, **sizes: Any) -> None:
    """Raise `InputError` unless each of the sizes is a whole number of at least 1."""
    for name, size in sizes.items():
        try:
            whole = 0 if isinstance(size, bool) else operator.index(size)
        except TypeError:
            whole = 0
        if whole < 1:
            raise InputError(
                f"{owner}: {name} must be a whole number of at least 1, but it is {size!r}"
            )


def require_module(name: str, message: str) -> None:
    """Raise `InputError(message)` unless the module `name` is installed. Does not import it."""
    if sys.modules.get(name, False) is None or importlib.util.find_spec(name) is None:
        raise InputError(message)


def import_library(name: str, message: str) -> Any:
    """Import the optional dependency `name`; `InputError(message)` if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(message) from error


def unknown_name(kind: str, name: str, known: Iterable[str], more: str = "") -> InputError:
    """Build the error for a name not in `known`. It suggests the nearest; `more` is appended."""
    names = list(known)
    near = get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    return InputError(
        f"no {kind} is called {name!r}: {hint}there are {', '.join(names) or 'none'}{more}"
    )

"""What can go wrong, as types: one clear sentence each, printed without a traceback."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class NormattnError(Exception):
    """Base of every error that this library raises on purpose."""


_LONGEST_WORD, _LONGEST_SENTENCE = 320, 2000


class InputError(NormattnError, ValueError):
    """A value from outside cannot be used; the message says what, where, what was expected.

    Quoted input may have any length: of a word of more than 320 characters, and of a message of
    more than 2,000, only the beginning and the end are shown.
    """

    def __str__(self) -> str:
        # Not in `__init__`: torch.compile, which reports what is raised, can look into none.
        text = super().__str__()
        if len(text) > _LONGEST_WORD:
            text = re.sub(rf"\S{{{_LONGEST_WORD + 1},}}", lambda word: _shown(word[0], 100), text)
        return _shown(text, 900) if len(text) > _LONGEST_SENTENCE else text


def _shown(text: str, kept: int) -> str:
    """The first and last characters, and how many there are."""
    return f"{text[:kept]}… ({len(text):,} characters) …{text[-kept:]}"


class DivergedError(NormattnError):
    """A loss became NaN or infinite.

    `step` is the optimiser step, `where` the module whose output was first not finite, and
    `checkpoint` the last good checkpoint (None when there is none yet).
    """

    def __init__(self, step: int, where: str, checkpoint: str | None) -> None:
        self.step = step
        self.where = where
        self.checkpoint = checkpoint
        kept = f"the last good checkpoint is {checkpoint}" if checkpoint else "no checkpoint exists"
        super().__init__(f"the loss is not finite at step {step}; it began in {where}; {kept}")


class Interrupted(NormattnError):
    """Work was stopped by a signal after its state was saved; rerun the command to resume."""


def need(name: str, lacking: str) -> None:
    """Raise `InputError`, saying `lacking`, where the module `name` of an extra is not there.

    Quick: nothing is imported.
    """
    if sys.modules.get(name, False) is None or importlib.util.find_spec(name) is None:
        raise InputError(lacking)


def library(name: str, lacking: str) -> Any:
    """The module `name` of an extra; where it is not installed, an `InputError` that says so."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(lacking) from error


def unknown(kind: str, name: str, known: Iterable[str], more: str = "") -> InputError:
    """The error for a name that is none of `known`, with the nearest; `more` ends the sentence."""
    names = list(known)
    near = get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    return InputError(
        f"no {kind} is called {name!r}: {hint}there are {', '.join(names) or 'none'}{more}"
    )

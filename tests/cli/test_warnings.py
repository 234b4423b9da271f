"""Warnings of a command are sentences, without the file and the line of code they come from."""

from __future__ import annotations

import io
import os
import sys
import warnings

import pytest

from normattn import __main__


@pytest.mark.parametrize("terminal", [False, True])
def test_a_warning_is_a_sentence_and_bars_of_libraries_are_for_terminals(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Carriage returns of tqdm in a log are many copies of one bar."""

    class Stderr(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(sys, "argv", ["normattn", "--version"])
    monkeypatch.setattr(sys, "stderr", Stderr())
    monkeypatch.setenv("TQDM_DISABLE", "so that it is restored")
    monkeypatch.delenv("TQDM_DISABLE")
    with pytest.raises(SystemExit):
        __main__._command()
    assert ("TQDM_DISABLE" in os.environ) is not terminal
    said = warnings.formatwarning("the cache is damaged", UserWarning, __file__, 1)
    assert said == "warning: the cache is damaged\n"

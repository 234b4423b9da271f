"""Warnings of a command are sentences, without the file and the line of code they come from."""

from __future__ import annotations

import sys
import warnings

import pytest

from normattn import __main__


def test_a_warning_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(sys, "argv", ["normattn", "--version"])
    with pytest.raises(SystemExit):
        __main__._command()
    said = warnings.formatwarning("the cache is damaged", UserWarning, __file__, 1)
    assert said == "warning: the cache is damaged\n"

"""Corpora as values: `python-source`, `python-packages`, a path, or `hf:NAME`.

A new kind of corpus, or a new file format, is one new file in this folder that registers itself.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from urllib.parse import parse_qsl

from normattn.data.corpora.corpus import Corpus, Document, kinds, register
from normattn.errors import InputError
from normattn.files import expanded

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

_EXPECTED = "python-source, python-packages, the path of a file or folder, or hf:NAME"


def parse_corpus(text: str) -> Corpus:
    """The corpus that an address names: `body` or `body?option=value&…`.

    `python-source`, `python-packages`, the path of a file or a folder, or `hf:NAME`. Raises
    `InputError` for anything else, with the nearest name, and for options that the kind does not
    know.
    """
    body, options = _split(text)
    for kind in kinds().values():
        if kind.claims(body):
            return kind.parse(body, options)
    raise InputError(_unknown(body))


def _split(text: str) -> tuple[str, dict[str, str]]:
    body, mark, query = text.partition("?")
    if not text.strip():
        raise InputError(f"the corpus has no name: expected {_EXPECTED}")
    if not mark or expanded(text).exists():
        return text, {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True)
    except ValueError as error:
        raise InputError(f"corpus {text!r}: expected ?option=value&… behind the name") from error
    return body, dict(pairs)


def _unknown(body: str) -> str:
    named = [name for name in kinds() if name != "path"]
    near = difflib.get_close_matches(body, named, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"corpus {body!r} does not exist: {hint}expected {_EXPECTED}"


__all__ = ["Corpus", "Document", "kinds", "parse_corpus", "register"]

"""Corpora as values: `python-source`, `python-packages`, a path, or `hf:NAME`.

A new kind of corpus, or a new file format, is one new file in this folder that registers itself.
"""

from __future__ import annotations

import importlib
import pkgutil

from normattn.lab.data.corpora.corpus import CORPORA, Corpus, Document

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def parse_corpus(text: str) -> Corpus:
    """The corpus that an address names: `body` or `body?option=value&…`.

    `python-source`, `python-packages`, the path of a file or a folder, or `hf:NAME`. Raises
    `InputError` for anything else, with the nearest name, and for options that the kind does not
    know.
    """
    kind, body, options = CORPORA.find(text)
    return kind.parse(body, options)


__all__ = ["CORPORA", "Corpus", "Document", "parse_corpus"]

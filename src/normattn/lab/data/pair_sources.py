"""Sentence pairs by address: a folder, two aligned files, rows, the hub, translation catalogues."""

from __future__ import annotations

import gettext
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from itertools import zip_longest
from pathlib import Path
from typing import Any

from normattn.errors import InputError
from normattn.io import expand_path, open_file
from normattn.lab.data import hub
from normattn.lab.data.corpora import rows_of
from normattn.lab.data.sources import (
    SPLITS,
    Address,
    Corpus,
    Document,
    Part,
    SplitName,
    file_corpus,
    split_files,
    without_repeats,
)
from normattn.lab.data.text_files import ROWS, suffix_of, text_lines, text_of


def parse_pairs(text: str, source: str, target: str) -> Corpus:
    """The sentence pairs that an address names: `body` or `body?option=value&…`.

    `catalogues`: messages of two installed packages. `FOLDER[?test=NAME]`: files `NAME.LANGUAGE`,
    NAME beginning with train, val (dev) or test. `FILE,FILE`, the source language first.
    `FILE.jsonl`, `.parquet`, `.csv`, `.tsv` or `hf:NAME`: rows with a field for each language, also
    inside `translation`. `.gz` of text and JSON lines. A document is the sentence and its
    translation; a side may be empty. Raises `InputError` for anything else and for options that
    the kind does not know.
    """
    if source == target:
        raise InputError(
            f"pairs cannot be translated from {source!r} into {target!r}: name two languages"
        )
    address = Address.parse(text, "corpus of sentence pairs")
    body, path = address.body, expand_path(address.body)
    read = partial(_pair_row, source, target)
    if body.startswith(hub.PREFIX):
        address.take(*hub.OPTIONS)
        return hub.hub_corpus(address, read, held_out=True)
    if body != "catalogues" and path.is_dir():
        return _folder(path, source, target, address.take("test")["test"])
    address.take()
    first, _, second = body.partition(",")
    if body == "catalogues":
        return _catalogues(source, target)
    if second and expand_path(first).is_file():
        return file_corpus([Part(body, (expand_path(first), expand_path(second)))], _line_pairs)
    if suffix_of(path) in ROWS and path.is_file():
        return file_corpus([Part(path.name, (path,))], partial(rows_of, read))
    raise InputError(
        f"corpus {body!r} holds no sentence pairs: expected catalogues, a folder of train/val/test "
        "files by language, two aligned files as FILE,FILE, a .jsonl, .parquet, .csv or .tsv file, "
        "or hf:NAME"
    )


def _pair_row(source: str, target: str, name: str, row: Mapping[str, Any], where: str) -> Document:
    """Each language's sentence in its field (or in `translation`), and the split in `split`."""
    fields, split = row.get("translation", row), row.get("split")
    if not isinstance(fields, dict):
        raise InputError(f"{where} is not an object of sentences by language")
    if split is not None and split not in SPLITS:
        raise InputError(f"{where}: split is {split!r}; expected one of {', '.join(SPLITS)}")
    hint = "choose the languages with data.source and data.target"
    here, there = (text_of(fields, side, where, hint) for side in (source, target))
    return Document(name, here, split=split, target=there)


def _line_pairs(_: str, source: Path, target: Path) -> Iterator[Document]:
    """Line n of one file with line n of the other (plain or `.gz`), without their line ends."""
    lines = zip_longest(text_lines(source), text_lines(target))
    for number, (here, there) in enumerate(lines, start=1):
        if here is None or there is None:
            long, short = (target, source) if here is None else (source, target)
            raise InputError(
                f"{long} has a line {number:,} and {short} has not: line n of one must be the "
                "translation of line n of the other"
            )
        texts = (text.rstrip("\r\n") for _, text in (here, there))
        yield Document(f"{source.name}:{number}", next(texts), target=next(texts))


def _folder(folder: Path, source: str, target: str, test: str | None) -> Corpus:
    """The one file of each split in either language; of several test sets the one called `test`.

    A file is `NAME.LANGUAGE` or `NAME.LANGUAGE.gz`. A split that is held out may be missing.
    """
    names: dict[SplitName, str] = {"train": "train.*", "validation": "(?:val|dev).*"}
    names["test"] = re.escape(test) if test else "test.*"
    hint = "; ?test=NAME chooses one of several test sets"
    here, there = (
        split_files(folder, names, rf"\.{re.escape(side)}(?:\.(?:gz|GZ))?", hint)
        for side in (source, target)
    )
    needed = {"train", *here, *there, *(["test"] if test else [])}
    for split in SPLITS:
        if split not in needed or (split in here and split in there):
            continue
        name = test if test and split == "test" else split
        has = ", ".join(side[split].name for side in (here, there) if split in side) or "none"
        raise InputError(
            f"{folder} needs {name}.{source} and {name}.{target} (or .gz), but has {has}"
        )
    # A training pair stays open, so that splits without files can be cut from them.
    parts = [
        Part(here[split].name, (here[split], there[split]), None if split == "train" else split)
        for split in SPLITS
        if split in here
    ]
    return file_corpus(parts, _line_pairs)


# Translation catalogues.

PACKAGES = ("mercurial", "gramps")
"""Whose catalogues are read: two packages that need next to nothing else."""
_MOST_WORDS, _LEAST_WORDS = 60, 3
_FILLER = "X"
"""Replaces placeholders of a program: `cannot open %s` becomes `cannot open X`."""
_CONTEXT = "\x04"  # gettext writes "context\x04message"
_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
_FILLED_IN = re.compile(
    r"%\([^()]*\)(?:[-+0#]*\d*(?:\.\d+)?[A-Za-z])?"  # %(name)s
    r"|%(?:\d+\$)?[-+0#]*\d*(?:\.\d+)?[sdifrgxXuc]\b"  # %s, %1$s, %.0f
    r"|\$?\{[^{}]*\}"  # {name}, ${name}
    r"|\$\([^()]*\)"  # $(name)
)
_WORD = re.compile(r"[^\W\d_]{2,}|\b[aAIX]\b")
_KEY = re.compile(r"_(?=\w)")


def _catalogues(source: str, target: str) -> Corpus:
    """The messages of installed packages and their translations, from GNU gettext's `.mo` files.

    Read from the package's files, nothing of it is imported. Placeholders, tags and access keys
    are taken out; what is no sentence pair then (fewer than three words, an option list, an
    untranslated message) is left out, and so is a message seen before, letter case aside. The
    messages belong to their packages and stay under their licences.
    """
    if source != "en":
        raise InputError(f"catalogues translate from 'en'; for {source!r} give your own pairs")
    files = [file for package in PACKAGES for file in _catalogue_files(package, target)]
    parts = [Part(str(path), (path,)) for path in files]
    return file_corpus(parts, _catalogue_pairs, sift=partial(without_repeats, key=str.casefold))


def _catalogue_files(package: str, language: str) -> Sequence[Path]:
    try:
        files = metadata.distribution(package).files or []
    except metadata.PackageNotFoundError as error:
        raise InputError(
            f"the corpus 'catalogues' reads the messages of {package}, and {package} is not "
            "installed: pip install 'normattn[translation]', or give your own sentence pairs"
        ) from error
    folder = f"/{language}/LC_MESSAGES/"
    found = [file for file in files if folder in f"/{file.as_posix()}" and file.suffix == ".mo"]
    if not found:
        raise InputError(f"{package} has no translations into {language!r}")
    return [Path(str(file.locate())) for file in sorted(found, key=lambda file: file.as_posix())]


def _catalogue_pairs(_: str, path: Path) -> Iterator[Document]:
    """The sentence pairs among the messages of one file, of a plural the first form."""
    with open_file(path) as file:
        try:
            translations = gettext.GNUTranslations(file)
        except (LookupError, OSError, ValueError, struct.error) as error:
            raise InputError(f"{path} is no catalogue of messages: {error}") from error
    # gettext has no public way to list a catalogue: this is the table it looks words up in.
    catalogue: Mapping[Any, str] = vars(translations)["_catalog"]
    number = 0
    for key, translation in catalogue.items():
        message, form = key if isinstance(key, tuple) else (key, 0)
        if message and form == 0:  # neither the header nor a further plural
            here, there = _cleaned(message, translation)
            if is_sentence_pair(here, there):
                yield Document(f"{path.name}:{number}", here, target=there)
            number += 1


def _cleaned(source: str, target: str) -> tuple[str, str]:
    """A message and its translation as plain sentences of one line each."""
    a, b = (
        _FILLED_IN.sub(_FILLER, _TAG.sub(" ", text.rpartition(_CONTEXT)[2])).replace("%%", "%")
        for text in (source, target)
    )
    a, b = " ".join(a.split()), " ".join(b.split())
    # An underscore before an access key (`_Open`, `E_xit`) is not part of the word; identifiers
    # that hold one are the same in both languages and keep it.
    shared = {word for word in a.split() if "_" in word} & set(b.split())
    if len(_KEY.findall(a)) == len(_KEY.findall(b)) == 1 and not shared:
        a, b = _KEY.sub("", a), _KEY.sub("", b)
    return a, b


def is_sentence_pair(source: str, target: str) -> bool:
    """Whether both sides are three to sixty words, mostly letters, and differ.

    Also refused: one side more than three times as long as the other (not a translation of it).
    """
    if source.casefold() == target.casefold():
        return False
    short, long = sorted((len(source), len(target)))
    return long <= 3 * short and _readable(source) and _readable(target)


def _readable(text: str) -> bool:
    letters = sum(character.isalpha() for character in text)
    filled = sum(not character.isspace() for character in text)
    return (
        len(_WORD.findall(text)) >= _LEAST_WORDS
        and _LEAST_WORDS <= len(text.split()) <= _MOST_WORDS
        and letters >= 0.7 * filled
        and not text.isupper()
    )

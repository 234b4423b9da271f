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
from normattn.io import expanded, open_file
from normattn.lab.data.corpora import rows_of
from normattn.lab.data.sources import (
    PREFIX,
    SPLITS,
    Address,
    Corpus,
    Document,
    FileCorpus,
    HubCorpus,
    SplitName,
)
from normattn.lab.data.text_files import ROWS, suffix_of, text_lines, text_of

_STARTS: Mapping[SplitName, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("val", "dev"),
    "test": ("test",),
}


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
            f"the pairs are to be translated from {source!r} into {target!r}: name two languages"
        )
    address = Address.parse(text, "corpus of sentence pairs")
    body, path = address.body, expanded(address.body)
    read = partial(_pair_row, source, target)
    if body == "catalogues":
        address.take()
        return _catalogues(source, target)
    if body.startswith(PREFIX):
        return HubCorpus(address, read, held_out=True)
    if path.is_dir():
        return _folder(path, source, target, address.take("test")["test"])
    address.take()
    first, _, second = body.partition(",")
    if second and expanded(first).is_file():
        return _aligned((expanded(first), expanded(second), None))
    if suffix_of(path) in ROWS and path.is_file():
        return FileCorpus({path.name: path}, partial(rows_of, read))
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


Part = tuple[Path, Path, SplitName | None]
"""Two aligned files, and the split that they are (None: of the training part)."""


def _aligned(*parts: Part) -> FileCorpus:
    """Line n of one file with line n of the other (plain or `.gz`), without their line ends."""
    paths = [path for source, target, _ in parts for path in (source, target)]
    files = {f"{number} {path.name}": path for number, path in enumerate(paths)}
    by_source = {source: (target, split) for source, target, split in parts}
    held_out = tuple(split for *_, split in parts if split is not None)
    return FileCorpus(files, partial(_line_pairs, by_source), held_out=held_out)


def _line_pairs(
    by_source: Mapping[Path, tuple[Path, SplitName | None]], _: str, source: Path
) -> Iterator[Document]:
    """The pairs of lines of a source file; `InputError` where one file has more than the other."""
    if source not in by_source:
        return
    target, split = by_source[source]
    here = there = 0
    for a, b in zip_longest(text_lines(source), text_lines(target)):
        here, there = here + (a is not None), there + (b is not None)
        if a is not None and b is not None:
            line, translation = a[1].rstrip("\r\n"), b[1].rstrip("\r\n")
            yield Document(f"{source.name}:{here}", line, split=split, target=translation)
    if here != there:
        raise InputError(
            f"{source} has {here:,} lines and {target} has {there:,}: line n of one must be the "
            "translation of line n of the other"
        )


def _folder(folder: Path, source: str, target: str, test: str | None) -> FileCorpus:
    """The one file of each split in either language; of several test sets the one called `test`.

    A file is `NAME.LANGUAGE` or `NAME.LANGUAGE.gz`. A split that is held out may be missing.
    """
    parts: list[Part] = []
    for split, starts in _STARTS.items():
        chosen = test if split == "test" else None
        found = [
            [
                path
                for path in sorted(folder.iterdir())
                if (name := _name(path, language)) is not None
                and (name.startswith(starts) if chosen is None else name == chosen)
            ]
            for language in (source, target)
        ]
        if split != "train" and chosen is None and not any(found):
            continue
        if [len(paths) for paths in found] != [1, 1]:
            holds = ", ".join(path.name for paths in found for path in paths) or "none"
            raise InputError(
                f"{folder} needs one {split} set, {chosen or starts[0]}.{source} and "
                f"{chosen or starts[0]}.{target} (or .gz), but has {holds}; ?test=NAME chooses one "
                "of several test sets"
            )
        # A training pair stays open, so that splits without files can be cut from them.
        parts.append((found[0][0], found[1][0], None if split == "train" else split))
    return _aligned(*parts)


def _name(path: Path, language: str) -> str | None:
    """What a file of this language is called without its suffixes; None for any other file."""
    name, dot, end = re.sub(r"\.gz$", "", path.name, flags=re.I).rpartition(".")
    return name if dot and end == language and path.is_file() else None


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


class Catalogues(FileCorpus):
    """The messages of installed packages and their translations, from GNU gettext's `.mo` files.

    Read from the package's files, nothing of it is imported. Placeholders, tags and access keys
    are taken out; what is no sentence pair then (fewer than three words, an option list, an
    untranslated message) is left out, and so is a message seen before, letter case aside. The
    messages belong to their packages and stay under their licences.
    """

    def documents(self, limit: int | None = None) -> Iterator[Document]:
        """Stream the messages."""
        seen: set[str] = set()
        for document in super().documents(limit):
            if document.text.casefold() not in seen:
                seen.add(document.text.casefold())
                yield document


def _catalogues(source: str, target: str) -> Catalogues:
    if source != "en":
        raise InputError(f"catalogues translate from 'en'; for {source!r} give pairs of your own")
    files = [file for package in PACKAGES for file in _catalogue_files(package, target)]
    return Catalogues({str(path): path for path in files}, _catalogue_pairs)


def _catalogue_files(package: str, language: str) -> Sequence[Path]:
    try:
        files = metadata.distribution(package).files or []
    except metadata.PackageNotFoundError as error:
        raise InputError(
            f"the corpus 'catalogues' reads the messages of {package}, and {package} is not "
            "installed: pip install 'normattn[translation]', or give sentence pairs of your own"
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

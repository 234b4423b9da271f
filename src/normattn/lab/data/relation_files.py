"""Relation data in files, as NYT24 and WebNLG come: train, dev and test files, rel2id.json.

A file is a JSON array, JSON lines or Parquet of rows with a `text` and a `triple_list`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from normattn.errors import InputError
from normattn.io import parse_json, sha256_of
from normattn.lab.data.splits import SPLITS, SplitName
from normattn.lab.data.text_files import read_rows, read_text

STEMS: Mapping[SplitName, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("dev", "valid", "validation", "val"),
    "test": ("test",),
}
"""What a split's file may be called, with `_triples` behind it or not."""

_SUFFIXES = (".json", ".jsonl", ".parquet")
LABELS_FILE = "rel2id.json"
_FORM = '{"text": "…", "triple_list": [["subject", "relation", "object"], …]}'
_Name = Annotated[str, Field(min_length=1)]


class _Triple(NamedTuple):
    subject: Any
    relation: _Name
    object: Any


class _Row(NamedTuple):
    text: Annotated[str, Field(pattern=r"\S")]
    triple_list: list[_Triple]


_ROW = TypeAdapter(_Row)
_LABELS = TypeAdapter(dict[str, int])


@dataclass(frozen=True)
class RelationDocument:
    """One text, its name (unique inside its corpus) and the labels present, sorted, each once."""

    name: str
    text: str
    labels: tuple[str, ...]


@dataclass(frozen=True)
class RelationCorpus:
    """Documents by split, and every label that a document may have, in the order of the outputs.

    A label that no training document has can only be missed; it still counts.
    """

    splits: Mapping[SplitName, tuple[RelationDocument, ...]]
    labels: tuple[str, ...]


def read_folder(folder: Path) -> RelationCorpus:
    """Read the three splits in `folder`, and its labels.

    The files are `train_triples.json`, `dev_triples.json` (or valid, validation, val) and
    `test_triples.json`, with or without `_triples`, `.json`, `.jsonl` or `.parquet`. The labels
    are those of rel2id.json in the order of their numbers, and without that file every relation
    that occurs in any split, sorted. Raises `InputError` for a file that is missing, ambiguous or
    damaged, and for a relation that rel2id.json does not list.
    """
    files = split_files(folder)
    splits = {name: tuple(read_relations(path)) for name, path in files.items()}
    occurring = {
        label for split in splits.values() for document in split for label in document.labels
    }
    listed = folder / LABELS_FILE
    labels = read_labels(listed) if listed.exists() else tuple(sorted(occurring))
    unlisted = sorted(occurring - set(labels))
    if unlisted:
        raise InputError(f"{listed} does not list the relation {unlisted[0]!r}, which occurs")
    if not any(document.labels for document in splits["train"]):
        raise InputError(f"no document of {files['train']} has a relation")
    return RelationCorpus(splits, labels)


def folder_fingerprint(folder: Path) -> str:
    """Hash the content of the files that are read; `InputError` where one is not there."""
    digest = hashlib.sha256()
    listed = folder / LABELS_FILE
    for path in [*split_files(folder).values(), *([listed] if listed.exists() else [])]:
        digest.update(f"{path.name}\0{sha256_of(path)}".encode())
    return digest.hexdigest()


def read_relations(path: Path) -> list[RelationDocument]:
    """Read the documents of a `.json` file (one array), JSON lines or Parquet.

    Each has a `text` and a `triple_list` of [subject, relation, object]; its labels are the
    relations in that list. Documents are called `FILE:17`, by line, or by item of the array from
    1. Raises `InputError` naming file, place and what was expected.
    """
    documents = []
    for number, row in _rows(path):
        where = f"{path}:{number}"
        try:
            text, triples = _ROW.validate_python(
                (row.get("text"), row.get("triple_list")) if isinstance(row, dict) else row
            )
        except ValidationError as error:
            first = error.errors()[0]
            place = "".join(f"[{part!r}]" for part in first["loc"])
            raise InputError(f"{where}{place}: {first['msg']}; expected {_FORM}") from error
        labels = tuple(sorted({triple.relation for triple in triples}))
        documents.append(RelationDocument(f"{path.name}:{number}", text, labels))
    if not documents:
        raise InputError(f"{path} holds no document: expected objects {_FORM}")
    return documents


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    if path.suffix != ".json":
        yield from read_rows(path)
        return
    items = parse_json(read_text(path), str(path))
    if not isinstance(items, list):
        raise InputError(
            f"{path} holds a {type(items).__name__}; expected one array of objects {_FORM} "
            "(a file of one object a line is called .jsonl)"
        )
    yield from enumerate(items, start=1)


def split_files(folder: Path) -> dict[SplitName, Path]:
    """Find the one file of each split; `InputError` where there is none or more than one."""
    if not folder.is_dir():
        state = "is a file" if folder.exists() else "does not exist"
        raise InputError(
            f"the relation corpus {folder} {state}; expected python-imports or a folder with "
            "train, dev and test files"
        )
    files: dict[SplitName, Path] = {}
    for split in SPLITS:
        stems = [f"{stem}{end}" for stem in STEMS[split] for end in ("_triples", "")]
        names = [f"{stem}{suffix}" for stem in stems for suffix in _SUFFIXES]
        paths = [folder / name for name in names if (folder / name).is_file()]
        if len(paths) != 1:
            holds = " and ".join(path.name for path in paths) or "none"
            raise InputError(
                f"{folder} needs one file of the {split} split, called {names[0]} or another of "
                f"{', '.join(names[1:])}; it has {holds}"
            )
        files[split] = paths[0]
    return files


def read_labels(path: Path) -> tuple[str, ...]:
    """Read the labels of a rel2id.json: [{number: name}, {name: number}], or the second object."""
    value = parse_json(read_text(path), str(path))
    try:
        ids = _LABELS.validate_python(value[-1] if isinstance(value, list) else value, strict=True)
        if not ids or sorted(ids.values()) != list(range(len(ids))):
            raise ValueError("the numbers are not 0, 1, …")
    except (ValueError, IndexError) as error:
        raise InputError(
            f"{path}: expected relations numbered from 0, as "
            '[{"0": "country", …}, {"country": 0, …}]'
        ) from error
    return tuple(sorted(ids, key=lambda name: ids[name]))

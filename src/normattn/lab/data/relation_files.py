"""Relation data in files, as NYT24 and WebNLG come: train, dev and test files, rel2id.json.

A file is a JSON array, or JSON lines, of objects with a text and its triples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from normattn.errors import InputError
from normattn.io import open_file, parse_json
from normattn.lab.data.splits import SPLITS, SplitName
from normattn.lab.data.text_files import read_text, text_lines, without_surrogates

STEMS: Mapping[SplitName, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("dev", "valid", "validation", "val"),
    "test": ("test",),
}
"""What a split's file may be called, with `_triples` behind it or not."""

_SUFFIXES = (".json", ".jsonl")
LABELS_FILE = "rel2id.json"
_FORM = '{"text": "…", "triple_list": [["subject", "relation", "object"], …]}'


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
    """The three splits in `folder`, and its labels.

    The files are `train_triples.json`, `dev_triples.json` (or valid, validation, val) and
    `test_triples.json`, with or without `_triples`, `.json` or `.jsonl`. The labels are those of
    rel2id.json in the order of their numbers, and without that file every relation that occurs in
    any split, sorted. Raises `InputError` for a file that is missing, ambiguous or damaged, and for
    a relation that rel2id.json does not list.
    """
    splits = {name: tuple(read_relations(_file(folder, name))) for name in SPLITS}
    occurring = {
        label for split in splits.values() for document in split for label in document.labels
    }
    listed = folder / LABELS_FILE
    labels = read_labels(listed) if listed.exists() else tuple(sorted(occurring))
    unlisted = sorted(occurring - set(labels))
    if unlisted:
        raise InputError(f"{listed} does not list the relation {unlisted[0]!r}, which occurs")
    if not any(document.labels for document in splits["train"]):
        raise InputError(f"no document of {_file(folder, 'train')} has a relation")
    return RelationCorpus(splits, labels)


def folder_fingerprint(folder: Path) -> str:
    """Hash of the content of the files that are read; `InputError` where one is not there."""
    digest = hashlib.sha256()
    listed = folder / LABELS_FILE
    paths = [_file(folder, name) for name in SPLITS]
    for path in [*paths, *([listed] if listed.exists() else [])]:
        with open_file(path) as file:
            content = hashlib.sha256(file.read())
        digest.update(f"{path.name}\0".encode() + content.digest())
    return digest.hexdigest()


def look_for_folder(folder: Path) -> None:
    """Raise `InputError` where the folder has not one file of each split."""
    for name in SPLITS:
        _file(folder, name)


def read_relations(path: Path) -> list[RelationDocument]:
    """The documents of a `.json` file (one array) or a `.jsonl` file (an object a line).

    Each has a `text` and a `triple_list` of [subject, relation, object]; its labels are the
    relations in that list. Documents are called `FILE:17`, by line or by item of the array,
    counted from 1. Raises `InputError` naming file, place and what was expected.
    """
    items = _lines(path) if path.suffix == ".jsonl" else _array(path)
    documents = [_document(item, where) for where, item in items]
    if not documents:
        raise InputError(f"{path} holds no document: expected objects {_FORM}")
    return documents


def _array(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        items = parse_json(read_text(path), str(path))
    except InputError as error:
        if not (isinstance(error.__cause__, JSONDecodeError) and "Extra data" in str(error)):
            raise
        raise InputError(f"{error}; if it holds one object a line, call it .jsonl") from error
    if not isinstance(items, list):
        raise InputError(
            f"{path} holds {_kind(items)}; expected one array of objects {_FORM} "
            "(a file of one object a line is called .jsonl)"
        )
    for number, item in enumerate(items, start=1):
        yield f"{path}, item {number}", item


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in text_lines(path, lambda n: f"{path}, line {n}"):
        where = f"{path}, line {number}"
        yield where, parse_json(line, where)


def _document(item: Any, where: str) -> RelationDocument:
    if not isinstance(item, dict):
        raise InputError(f"{where} is {_kind(item)}; expected an object {_FORM}")
    for field in ("text", "triple_list"):
        if field not in item:
            names = ", ".join(map(repr, item)) or "none"
            raise InputError(f"{where} has no field {field!r} (its fields: {names})")
    text = item["text"]
    if not isinstance(text, str) or not text.strip():
        problem = "empty" if isinstance(text, str) else _kind(text)
        raise InputError(f"{where}: field 'text' is {problem}; expected some text")
    path, _, position = where.rpartition(", ")
    name = f"{Path(path).name}:{position.rpartition(' ')[2]}"
    labels = _labels(item["triple_list"], where)
    return RelationDocument(name, without_surrogates(text), labels)


def _labels(triples: Any, where: str) -> tuple[str, ...]:
    """The relations of the triples, sorted, each once."""
    if not isinstance(triples, list):
        raise InputError(f"{where}: field 'triple_list' is {_kind(triples)}; expected an array")
    relations = set()
    for number, triple in enumerate(triples, start=1):
        if not isinstance(triple, list) or len(triple) != 3:
            shown = f"an array of {len(triple)}" if isinstance(triple, list) else _kind(triple)
            raise InputError(
                f"{where}: triple {number} is {shown}; expected [subject, relation, object]"
            )
        relation = triple[1]
        if not isinstance(relation, str) or not relation:
            raise InputError(
                f"{where}: the relation of triple {number} is {_kind(relation)}; expected its name"
            )
        relations.add(relation)
    return tuple(sorted(relations))


def _kind(value: Any) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "null"
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "true or false"}
    return kinds.get(type(value), "a number")


def _file(folder: Path, split: SplitName) -> Path:
    """The one file of a split."""
    if not folder.is_dir():
        state = "is a file" if folder.exists() else "does not exist"
        raise InputError(
            f"the relation corpus {folder} {state}; expected python-imports or a folder with "
            "train, dev and test files"
        )
    names = [
        f"{stem}{ending}{suffix}"
        for stem in STEMS[split]
        for ending in ("_triples", "")
        for suffix in _SUFFIXES
    ]
    paths = [folder / name for name in names if (folder / name).is_file()]
    if not paths:
        there = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise InputError(
            f"{folder} has no file of the {split} split: expected {names[0]} or another of "
            f"{', '.join(names[1:])}; it holds {there}"
        )
    if len(paths) > 1:
        raise InputError(
            f"{folder} has two files of the {split} split, {paths[0].name} and {paths[1].name}; "
            "leave one"
        )
    return paths[0]


def read_labels(path: Path) -> tuple[str, ...]:
    """The labels of a rel2id.json: [{number: name}, {name: number}], or only the second object."""
    value = parse_json(read_text(path), str(path))
    ids = value[-1] if isinstance(value, list) and value else value
    whole = isinstance(ids, dict) and all(type(number) is int for number in ids.values())
    if not (whole and ids and sorted(ids.values()) == list(range(len(ids)))):
        raise InputError(
            f"{path}: expected relations numbered from 0, as "
            '[{"0": "country", …}, {"country": 0, …}]'
        )
    return tuple(sorted(ids, key=lambda name: int(ids[name])))

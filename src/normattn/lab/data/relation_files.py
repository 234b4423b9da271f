"""Relation data by address: a folder or hub data set in the NYT24 and WebNLG form, rel2id.json.

A row has a `text` and a `triple_list`; the relations of the triples are the text's labels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from normattn.errors import InputError
from normattn.io import parse_json, sha256_of
from normattn.lab.data.hub import HubRows
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


class _Triple(NamedTuple):
    subject: Any
    relation: Annotated[str, Field(min_length=1)]
    object: Any


class _Row(NamedTuple):
    text: Annotated[str, Field(pattern=r"\S")]
    triple_list: list[_Triple]


_ROW = TypeAdapter(_Row)
_LABELS = TypeAdapter(dict[str, int])


class RelationDocument(NamedTuple):
    """One text, its split, its name (unique inside its corpus) and its sorted labels."""

    split: SplitName
    name: str
    text: str
    labels: tuple[str, ...]


@dataclass(frozen=True)
class RelationSource:
    """Labelled documents that can be read again.

    `read` streams them split by split. `labels` are all that a document may have, in the order of
    the outputs; one that no training document has can only be missed, and still counts.
    `fingerprint` changes with the documents. Each raises `InputError` for damaged data.
    """

    read: Callable[[], Iterator[RelationDocument]]
    labels: Callable[[], tuple[str, ...]]
    fingerprint: Callable[[], str]
    notes: Callable[[], tuple[str, ...]] = tuple


def folder_source(folder: Path) -> RelationSource:
    """The three splits in `folder`, and its labels.

    The files are `train_triples.json`, `dev_triples.json` (or valid, validation, val) and
    `test_triples.json`, with or without `_triples`, `.json`, `.jsonl` or `.parquet`. The labels
    are those of rel2id.json in the order of their numbers, and without that file every relation
    that occurs in any split, sorted. Raises `InputError` for a file that is missing or ambiguous,
    and as it is read for one that is damaged or has a relation that rel2id.json does not list.
    """
    files, listed = _split_files(folder), folder / LABELS_FILE

    def read() -> Iterator[RelationDocument]:
        for split, path in files.items():
            yield from read_relations(path, split)

    @cache
    def labels() -> tuple[str, ...]:
        occurring = _occurring(read())
        if not listed.exists():
            return occurring
        known = read_labels(listed)
        for relation in occurring:
            if relation not in known:
                raise InputError(f"{listed} does not list the relation {relation!r}, which occurs")
        return known

    def fingerprint() -> str:
        paths = [*files.values(), *([listed] if listed.exists() else [])]
        parts = "".join(f"{path.name}\0{sha256_of(path)}" for path in paths)
        return hashlib.sha256(parts.encode()).hexdigest()

    return RelationSource(read, labels, fingerprint)


def hub_source(hub: HubRows) -> RelationSource:
    """The splits train, validation and test of a data set of the hub, with every relation in it."""
    if hub.split is not None:
        raise InputError(f"corpus '{hub.address}': relations are read from all splits; no ?split=")

    def read() -> Iterator[RelationDocument]:
        for split in SPLITS:
            rows = enumerate(hub.rows(split))
            yield from _documents(rows, split, f"corpus '{hub.address}', {split} row ", split)

    labels = cache(lambda: _occurring(read()))
    return RelationSource(read, labels, hub.fingerprint, hub.notes)


def _occurring(documents: Iterable[RelationDocument]) -> tuple[str, ...]:
    """Every relation, sorted; `InputError` where the train split has none."""
    occurring: set[str] = set()
    trained = False
    for document in documents:
        occurring.update(document.labels)
        trained |= document.split == "train" and bool(document.labels)
    if not trained:
        raise InputError("no document of the train split has a relation")
    return tuple(sorted(occurring))


def read_relations(path: Path, split: SplitName = "train") -> Iterator[RelationDocument]:
    """Read the documents of a `.json` file (one array), JSON lines or Parquet.

    Each has a `text` and a `triple_list` of [subject, relation, object]; its labels are the
    relations in that list. Documents are called `FILE:17`, by line, or by item of the array from
    1. Raises `InputError` naming file, place and what was expected.
    """
    return _documents(read_rows(path), split, f"{path}:", path.name)


def _documents(
    rows: Iterable[tuple[int, dict[str, Any]]], split: SplitName, where: str, name: str
) -> Iterator[RelationDocument]:
    number = None
    for number, row in rows:
        try:
            text, triples = _ROW.validate_python((row.get("text"), row.get("triple_list")))
        except ValidationError as error:
            first = error.errors()[0]
            place = "".join(f"[{part!r}]" for part in first["loc"])
            raise InputError(f"{where}{number}{place}: {first['msg']}; expected {_FORM}") from error
        labels = tuple(sorted({triple.relation for triple in triples}))
        yield RelationDocument(split, f"{name}:{number}", text, labels)
    if number is None:
        raise InputError(f"{where} there is no document: expected objects {_FORM}")


def _split_files(folder: Path) -> dict[SplitName, Path]:
    """Find the one file of each split; `InputError` where there is none or more than one."""
    if not folder.is_dir():
        state = "is a file" if folder.exists() else "does not exist"
        raise InputError(
            f"the relation corpus {folder} {state}; expected python-imports, hf:NAME or a folder "
            "with train, dev and test files"
        )
    files: dict[SplitName, Path] = {}
    for split, stems in STEMS.items():
        names = [f"{s}{e}{x}" for s in stems for e in ("_triples", "") for x in _SUFFIXES]
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

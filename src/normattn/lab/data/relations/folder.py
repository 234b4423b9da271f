"""A folder of relation data as NYT24 and WebNLG come: train, dev and test files, rel2id.json."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from normattn.errors import InputError
from normattn.files import expanded, open_file
from normattn.lab.data.relations.config import PYTHON_IMPORTS, RelationConfig
from normattn.lab.data.relations.documents import RELATIONS, RelationCorpus, RelationSource
from normattn.lab.data.relations.reading import read_relations
from normattn.lab.data.splits import SPLITS, SplitName
from normattn.lab.data.text_files import read_text
from normattn.structured import parse_json

STEMS: Mapping[SplitName, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("dev", "valid", "validation", "val"),
    "test": ("test",),
}
"""What a split's file may be called, with `_triples` behind it or not."""

_SUFFIXES = (".json", ".jsonl")
LABELS_FILE = "rel2id.json"


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
    labels = _numbered(listed) if listed.exists() else tuple(sorted(occurring))
    unlisted = sorted(occurring - set(labels))
    if unlisted:
        raise InputError(f"{listed} does not list the relation {unlisted[0]!r}, which occurs")
    if not any(document.labels for document in splits["train"]):
        raise InputError(f"no document of {_file(folder, 'train')} has a relation")
    return RelationCorpus(splits, labels)


@RELATIONS.register
@dataclass(frozen=True)
class RelationFolder(RelationSource):
    """A folder that `read_folder` reads."""

    folder: Path

    kind: ClassVar[str] = "folder"
    summary: ClassVar[str] = "a folder of train, dev and test files in NYT24's form"

    @classmethod
    def claims(cls, body: str) -> bool:
        """Every other address: a folder that is not there is named as one."""
        return body != PYTHON_IMPORTS

    @classmethod
    def parse(cls, body: str) -> RelationFolder:
        """The folder of a path."""
        return cls(expanded(body))

    def read(self, config: RelationConfig) -> RelationCorpus:
        """The three splits and the labels."""
        return read_folder(self.folder)

    def look(self) -> None:
        """Raise `InputError` where the folder has not one file of each split."""
        for name in SPLITS:
            _file(self.folder, name)

    def fingerprint(self) -> str:
        """Hash of the content of the files that are read."""
        digest = hashlib.sha256()
        listed = self.folder / LABELS_FILE
        paths = [_file(self.folder, name) for name in SPLITS]
        for path in [*paths, *([listed] if listed.exists() else [])]:
            with open_file(path) as file:
                content = hashlib.sha256(file.read())
            digest.update(f"{path.name}\0".encode() + content.digest())
        return digest.hexdigest()


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


def _numbered(path: Path) -> tuple[str, ...]:
    """The labels of a rel2id.json: [{number: name}, {name: number}], or only the second object."""
    value = parse_json(read_text(path), str(path))
    ids = value[-1] if isinstance(value, list) and value else value
    numbers = sorted(ids.values()) if isinstance(ids, dict) and _all_integers(ids) else None
    if numbers != list(range(len(numbers or ()))) or not numbers:
        raise InputError(
            f"{path}: expected relations numbered from 0, as "
            '[{"0": "country", …}, {"country": 0, …}]'
        )
    return tuple(sorted(ids, key=lambda name: int(ids[name])))


def _all_integers(ids: dict[str, Any]) -> bool:
    return all(type(number) is int for number in ids.values())

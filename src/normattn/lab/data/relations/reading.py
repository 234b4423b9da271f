"""The NYT24 form: a JSON array, or JSON lines, of objects with a text and its triples."""

from __future__ import annotations

from collections.abc import Iterator
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from normattn.errors import InputError
from normattn.lab.data.relations.documents import RelationDocument
from normattn.lab.data.text_files import read_text, text_lines, without_surrogates
from normattn.structured import parse_json

_FORM = '{"text": "…", "triple_list": [["subject", "relation", "object"], …]}'


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

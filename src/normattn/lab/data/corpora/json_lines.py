"""JSON lines: one object a line, its text under one field; every line is a document."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from normattn.errors import InputError
from normattn.lab.data.corpora.corpus import Document
from normattn.lab.data.corpora.formats import FileFormat, register_format
from normattn.lab.data.corpora.reading import text_lines, without_surrogates
from normattn.structured import parse_json


def read_json_lines(path: Path, name: str, field: str) -> Iterator[Document]:
    """Documents `name:1`, `name:2`, … (line numbers); blank lines are passed over.

    Raises `InputError` naming file and line where a line is no JSON object with a text `field`.
    """
    for number, line in text_lines(path, lambda n: f"{path}:{n}"):
        yield Document(f"{name}:{number}", _text_of(line, f"{path}:{number}", field))


def _text_of(line: str, where: str, field: str) -> str:
    value = parse_json(line, where)
    if not isinstance(value, dict):
        raise InputError(f"{where} is not a JSON object but a {type(value).__name__}")
    text = value.get(field)
    if isinstance(text, str):
        return without_surrogates(text)
    if field in value:
        raise InputError(f"{where}: field {field!r} is not text but a {type(text).__name__}")
    fields = ", ".join(map(repr, value)) or "none"
    raise InputError(f"{where} has no field {field!r} (its fields: {fields}); choose with ?field=")


JSON_LINES = register_format(
    FileFormat("JSON lines", frozenset({".jsonl", ".ndjson"}), True, read_json_lines)
)

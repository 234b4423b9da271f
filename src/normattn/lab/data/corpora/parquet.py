"""Parquet: every row is a document, its text in one column; read page by page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from normattn.errors import InputError, library
from normattn.lab.data.corpora.corpus import Document
from normattn.lab.data.corpora.formats import FileFormat, register_format
from normattn.lab.data.corpora.reading import open_bytes

_ROWS = 256
_READ_BYTES = 1 << 20
"""Read at a time. Left alone, pyarrow reads a row group's column at once, which some writers make
as large as the file."""


def read_parquet(path: Path, name: str, field: str) -> Iterator[Document]:
    """Documents `name:0`, `name:1`, … (row numbers).

    Raises `InputError` when pyarrow is missing, the file is damaged, or the column is missing, is
    there twice or holds something else than text in UTF-8.
    """
    lacking = f"{path} needs pyarrow to be read: pip install 'normattn[data]'"
    pyarrow, parquet = (library(name, lacking) for name in ("pyarrow", "pyarrow.parquet"))
    row = 0
    with open_bytes(path) as file:
        try:
            table = parquet.ParquetFile(file, buffer_size=_READ_BYTES, pre_buffer=False)
            _check_column(path, table.schema_arrow, field)
            for batch in table.iter_batches(batch_size=_ROWS, columns=[field]):
                for value in batch.column(0):
                    yield Document(f"{name}:{row}", _text_of(value, path, row, field))
                    row += 1
        except pyarrow.ArrowException as error:
            first = str(error).splitlines()[0]
            raise InputError(f"{path} is not a whole Parquet file: {first}") from error


def _check_column(path: Path, schema: Any, field: str) -> None:
    if field not in schema.names:
        columns = ", ".join(map(repr, schema.names)) or "none"
        raise InputError(
            f"{path} has no column {field!r} (its columns: {columns}); choose with ?field="
        )
    if schema.names.count(field) > 1:
        raise InputError(f"{path} has several columns {field!r}; leave one, or rename them")
    kind = str(schema.field(field).type)
    if "string" not in kind:
        raise InputError(f"{path}: column {field!r} is not text but {kind}")


def _text_of(value: Any, path: Path, row: int, field: str) -> str:
    try:
        text = value.as_py()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}, row {row}: column {field!r} is not UTF-8: byte "
            f"0x{error.object[error.start]:02x} at offset {error.start} ({error.reason})"
        ) from error
    if not isinstance(text, str):
        raise InputError(f"{path}, row {row}: column {field!r} has no value")
    return text


PARQUET = register_format(FileFormat("Parquet", frozenset({".parquet"}), True, read_parquet))

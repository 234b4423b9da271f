"""Read files of text and tables. Every error names the file and the place in it."""

from __future__ import annotations

import gzip
import io
import tokenize
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

import polars as pl

from normattn.errors import InputError
from normattn.io import json_lines, open_file, parse_json

TEXT = frozenset(
    {".txt", ".text", ".md", ".rst", ".tex", ".org", ".adoc", ".html", ".xml", ".log"}
    | {".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js"}
    | {".ts", ".rb", ".pl", ".lua", ".sh", ".sql", ".toml", ".yaml", ".yml", ".ini", ".cfg"}
    | {".en", ".de"}
)
ROWS = frozenset({".jsonl", ".ndjson", ".parquet", ".csv", ".tsv"})
"""Files that hold rows of named fields."""
_CHUNK_ROWS = 256


def suffix_of(path: Path) -> str:
    """Return the lower-case suffix of a file, ignoring `.gz`."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def is_gzipped(path: Path) -> bool:
    """Return whether a file's name ends in `.gz`, in either case."""
    return path.suffix.lower() == ".gz"


def read_rows(
    path: Path, fields: Sequence[str] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the numbered rows of JSON lines, a JSON array (.json), or a Parquet, CSV or TSV file.

    Lines and array items count from 1 (blank lines are skipped), table rows from 0. Only `fields`
    of tables are read (default: all). Files are streamed, except JSON arrays.
    """
    suffix = suffix_of(path)
    if suffix in (".parquet", ".csv", ".tsv"):
        yield from enumerate(_table_rows(path, suffix, fields))
        return
    if suffix == ".json":
        items = parse_json(read_text(path), str(path))
        if not isinstance(items, list):
            raise InputError(
                f"{path} holds a {type(items).__name__}; expected one array of objects (a file of "
                "one object a line is called .jsonl)"
            )
        rows: Iterable[tuple[int, Any]] = enumerate(items, start=1)
    else:
        lines = ((number, line) for number, line in text_lines(path) if line.strip())
        rows = ((number, parse_json(line, f"{path}:{number}")) for number, line in lines)
    for number, row in rows:
        if not isinstance(row, dict):
            raise InputError(f"{path}:{number} is not a JSON object but a {type(row).__name__}")
        yield number, row


def _table_rows(path: Path, suffix: str, fields: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    row = 0
    with open_file(path):  # Raises for anything but a regular file.
        pass
    try:
        if suffix == ".parquet":
            frame = pl.scan_parquet(path, glob=False)
        else:
            separator = "\t" if suffix == ".tsv" else ","
            frame = pl.scan_csv(path, separator=separator, infer_schema=False, glob=False)
        columns = frame.collect_schema().names()
        selected = [name for name in columns if fields is None or name in fields] or columns
        if suffix == ".parquet":  # Of a CSV file polars would not see rows with too many fields.
            frame = frame.select(selected)
        for chunk in frame.collect_batches(chunk_size=_CHUNK_ROWS, maintain_order=True):
            for values in chunk.select(selected).iter_rows(named=True):
                yield values
                row += 1
    except (pl.exceptions.PolarsError, OSError, UnicodeDecodeError) as error:
        reason = (str(error).strip().splitlines() or ["damaged"])[0][:200]  # It may quote a row.
        kind = suffix.removeprefix(".")
        raise InputError(f"{path} cannot be read as {kind}, from row {row}: {reason}") from error


def field_of(row: Mapping[str, Any], field: str, where: str, hint: str) -> Any:
    """Return a field of a row; `InputError` lists the existing fields if it is missing."""
    if field not in row:
        fields = ", ".join(map(repr, row)) or "none"
        raise InputError(f"{where} has no field {field!r} (its fields: {fields}); {hint}")
    return row[field]


def text_of(row: Mapping[str, Any], field: str, where: str, hint: str = "use ?field=") -> str:
    """Return the text in a field of a row; `InputError` if it is missing or no text."""
    text = field_of(row, field, where, hint)
    if not isinstance(text, str):
        kind = "has no value" if text is None else f"is not text but a {type(text).__name__}"
        raise InputError(f"{where}: field {field!r} {kind}")
    return text


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Open a UTF-8 file, decompressed if its name ends in `.gz`, without a byte-order mark.

    Line ends are unchanged. Raises `InputError`, also while reading, if the file is missing,
    unreadable, a damaged gzip file or not UTF-8.
    """
    with open_file(path) as raw:
        file = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if is_gzipped(path) else raw
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="\n")
        try:
            yield text
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise InputError(
                f"{path} is not UTF-8 (byte 0x{byte:02x}: {error.reason}); convert it first"
            ) from error
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise InputError(f"{path} is not a whole gzip file: {error}") from error
        finally:
            text.close()


def read_text(path: Path) -> str:
    """Return the content of a text file."""
    with open_text(path) as file:
        return file.read()


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number (from 1) and the text of each line; `InputError` for one over 64 MiB."""
    with open_text(path) as file:
        yield from json_lines(file.readline, lambda number: f"{path}:{number}")


def text_pieces(path: Path, size: int) -> Iterator[str]:
    """Cut a text file into pieces of at most `size` characters, at line ends if possible."""
    text = ""
    with open_text(path) as file:
        while chunk := file.read(size):
            text += chunk
            while len(text) >= size:
                cut = text.rfind("\n", 0, size) + 1 or size
                yield text[:cut]
                text = text[cut:]
    if text:
        yield text


def decode_python(raw: bytes) -> str:
    """Decode Python source by its encoding; `SyntaxError` or `UnicodeDecodeError` if that fails."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
    return raw.decode(encoding)

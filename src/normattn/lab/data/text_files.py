"""Files of text and tables: read so that every mistake is one sentence that names the place."""

from __future__ import annotations

import codecs
import gzip
import io
import tokenize
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

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
_CHUNK = 1 << 16
_ROWS_AT_ONCE = 256


def suffix_of(path: Path) -> str:
    """The suffix of a file in small letters, the one before `.gz`."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def is_packed(path: Path) -> bool:
    """Whether a file is gzip's by its name, in letters of either case."""
    return path.suffix.lower() == ".gz"


# Rows.


def read_rows(
    path: Path, fields: Sequence[str] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of JSON lines, of a JSON array (.json), or of a Parquet, CSV or TSV file.

    Each has its number: lines and items of an array from 1 (blank lines are passed over), rows of
    tables from 0, of which only `fields` are read (default: all). Memory holds one line, or some
    hundred rows of a table (some row groups of Parquet), but an array whole. Raises `InputError`
    naming file and place.
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
        rows: Iterator[tuple[int, Any]] = iter(enumerate(items, start=1))
    else:
        filled = ((number, line) for number, line in text_lines(path) if line.strip())
        rows = ((number, parse_json(line, f"{path}:{number}")) for number, line in filled)
    for number, row in rows:
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise InputError(f"{path}:{number} is not a JSON object but a {kind}")
        yield number, row


def _table_rows(path: Path, suffix: str, fields: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    row = 0
    with open_file(path):  # says in words what is no regular file
        pass
    try:
        if suffix == ".parquet":
            frame = pl.scan_parquet(path, glob=False)
        else:
            separator = "\t" if suffix == ".tsv" else ","
            frame = pl.scan_csv(path, separator=separator, infer_schema=False, glob=False)
        columns = frame.collect_schema().names()
        chosen = [name for name in columns if fields is None or name in fields]
        if not chosen:  # What is said of a row holds for the whole table, also without rows.
            text_of(dict.fromkeys(columns), (fields or [""])[0], str(path))
        chunks = frame.select(chosen).collect_batches(chunk_size=_ROWS_AT_ONCE, maintain_order=True)
        for chunk in chunks:
            for values in chunk.iter_rows(named=True):
                yield values
                row += 1
    except (pl.exceptions.PolarsError, OSError, UnicodeDecodeError) as error:
        reason = (str(error).strip().splitlines() or ["damaged"])[0]
        kind = suffix.removeprefix(".")
        raise InputError(f"{path} cannot be read as {kind}, from row {row}: {reason}") from error


def text_of(row: Mapping[str, Any], field: str, where: str, option: str = "?field=") -> str:
    """The text in a field of a row; `InputError` where it is missing or no text."""
    if field not in row:
        fields = ", ".join(map(repr, row)) or "none"
        raise InputError(
            f"{where} has no field {field!r} (its fields: {fields}); choose with {option}"
        )
    text = row[field]
    if not isinstance(text, str):
        kind = "has no value" if text is None else f"is not text but a {type(text).__name__}"
        raise InputError(f"{where}: field {field!r} {kind}")
    return text


# Text.


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """Open `path` for reading, unpacked when its name ends in `.gz` or `.GZ`.

    Raises `InputError` when the file is missing, a folder, unreadable or a damaged gzip file,
    also when that shows only while it is read.
    """
    with open_file(path) as raw:
        if not is_packed(path):
            yield raw
            return
        try:
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield cast(BinaryIO, unpacked)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise InputError(f"{path} is not a whole gzip file: {error}") from error


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number, from 1, and the text of each line, with its end.

    Raises `InputError` for a line of more than 64 MiB, or one that is not UTF-8.
    """
    offset = 0
    with open_bytes(path) as file:
        for number, raw in json_lines(file.readline, lambda n: f"{path}:{n}"):
            try:
                line = raw.decode()
            except UnicodeDecodeError as error:
                raise _not_utf8(path, offset + error.start, error) from error
            offset += len(raw)
            yield number, line.removeprefix("\ufeff") if number == 1 else line


def read_text(path: Path) -> str:
    """The whole of a text file, its line ends as they are, without a byte-order mark."""
    return "".join(text_chunks(path))


def text_chunks(path: Path) -> Iterator[str]:
    """Yield a text file in pieces of about 64 kB; raises `InputError` as it reads."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, start = 0, True
    with open_bytes(path) as file:
        while chunk := file.read(_CHUNK):
            yield _decoded(decoder, chunk, path, offset).removeprefix("\ufeff" if start else "")
            offset, start = offset + len(chunk), False
        _decoded(decoder, b"", path, offset)


def _decoded(decoder: codecs.IncrementalDecoder, chunk: bytes, path: Path, offset: int) -> str:
    waiting = len(decoder.getstate()[0])
    try:
        return decoder.decode(chunk, final=not chunk)
    except UnicodeDecodeError as error:
        raise _not_utf8(path, offset - waiting + error.start, error) from error


def _not_utf8(path: Path, offset: int, error: UnicodeDecodeError) -> InputError:
    byte = error.object[error.start]
    return InputError(
        f"{path} is not UTF-8: byte 0x{byte:02x} at offset {offset} ({error.reason}); "
        "convert the file to UTF-8 first"
    )


def decode_python(raw: bytes) -> str:
    """Python source decoded by the language's own rule: the declared encoding, else UTF-8.

    Raises `SyntaxError` for an unknown encoding and `UnicodeDecodeError` for bytes that are not it.
    """
    encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
    return raw.decode(encoding)


def pieces(chunks: Iterator[str], size: int) -> Iterator[str]:
    """Cut a stream of text behind the last line end before every `size` characters.

    A line longer than `size` is cut inside. Never holds more than `size` characters and a chunk.
    """
    text = ""
    for chunk in chunks:
        text += chunk
        start = 0
        while len(text) - start >= size:
            cut = text.rfind("\n", start, start + size) + 1
            cut = cut if cut > start else start + size
            yield text[start:cut]
            start = cut
        text = text[start:]
    if text:
        yield text

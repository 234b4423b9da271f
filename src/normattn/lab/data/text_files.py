"""Files of text: opened and decoded so that every mistake is one sentence that names the file."""

from __future__ import annotations

import codecs
import gzip
import io
import tokenize
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import polars as pl

from normattn.errors import InputError
from normattn.io import json_lines, open_file, parse_json
from normattn.lab.data.sources import Document

PIECE_CHARACTERS = 1 << 15
"""A large text file is cut at line ends into documents of at most this much."""
TEXT = frozenset(
    {".txt", ".text", ".md", ".rst", ".tex", ".org", ".adoc", ".html", ".xml", ".log"}
    | {".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js"}
    | {".ts", ".rb", ".pl", ".lua", ".sh", ".sql", ".toml", ".yaml", ".yml", ".ini", ".cfg"}
    | {".en", ".de"}
)
LINES = frozenset({".jsonl", ".ndjson"})
TABLES = frozenset({".parquet", ".csv", ".tsv"})
_CHUNK = 1 << 16
_ROWS = 256


def suffix_of(path: Path) -> str:
    """The suffix of a file in small letters, the one before `.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def is_packed(path: Path) -> bool:
    """Whether a file is gzip's by its name, in letters of either case."""
    return path.suffix.lower() == ".gz"


def documents_of(path: Path, name: str, field: str) -> Iterator[Document]:
    """Yield the documents of one file: pieces of a text, or the rows of JSON lines or a table.

    `field` is the key or column that holds the text of a row. Raises `InputError` as the file is
    read.
    """
    if suffix_of(path) not in LINES | TABLES:
        for index, text in enumerate(pieces(text_chunks(path), PIECE_CHARACTERS)):
            yield Document(f"{name}#{index:05}", text)
        return
    for number, row in read_rows(path, [field]):
        yield Document(f"{name}:{number}", text_of(row, field, f"{path}:{number}"))


def text_of(row: Mapping[str, Any], field: str, where: str, hint: str = "?field=") -> str:
    """Return the text in a field of a row; `InputError` where it is missing or no text."""
    if field not in row:
        fields = ", ".join(map(repr, row)) or "none"
        raise InputError(
            f"{where} has no field {field!r} (its fields: {fields}); choose with {hint}"
        )
    text = row[field]
    if not isinstance(text, str):
        kind = "has no value" if text is None else f"is not text but a {type(text).__name__}"
        raise InputError(f"{where}: field {field!r} {kind}")
    return text


def read_rows(
    path: Path, fields: Sequence[str] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of JSON lines, or of a Parquet, CSV or TSV file, each with its number.

    Lines are numbered from 1, and blank ones are passed over; rows of tables are numbered from 0,
    and only their `fields` are read (default: all). Memory holds one line, or some hundred rows of
    a table (some row groups of Parquet). Raises `InputError` naming file and place.
    """
    if suffix_of(path) in TABLES:
        yield from enumerate(_table_rows(path, fields))
        return
    for number, line in text_lines(path, lambda n: f"{path}:{n}"):
        value = parse_json(line, f"{path}:{number}")
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise InputError(f"{path}:{number} is not a JSON object but a {kind}")
        yield number, value


def _table_rows(path: Path, fields: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    row = 0
    with open_file(path):  # says in words what is no regular file
        pass
    suffix = suffix_of(path)
    try:
        if suffix == ".parquet":
            frame = pl.scan_parquet(path, glob=False)
        else:
            separator = "\t" if suffix == ".tsv" else ","
            frame = pl.scan_csv(path, separator=separator, infer_schema=False, glob=False)
        columns = frame.collect_schema().names()
        chosen = [name for name in columns if fields is None or name in fields]
        if not chosen:
            # What text_of says of a row holds for the whole table, also for one without rows.
            text_of(dict.fromkeys(columns), (fields or [""])[0], str(path))
        for batch in frame.select(chosen).collect_batches(chunk_size=_ROWS, maintain_order=True):
            for values in batch.iter_rows(named=True):
                yield values
                row += 1
    except (pl.exceptions.PolarsError, OSError, UnicodeDecodeError) as error:
        first = (str(error).strip().splitlines() or ["damaged"])[0]
        kind = suffix.removeprefix(".")
        raise InputError(f"{path} cannot be read as {kind}, from row {row}: {first}") from error


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


def not_utf8(path: Path, offset: int, error: UnicodeDecodeError) -> InputError:
    """The error for a byte that is not UTF-8, at `offset` from the (unpacked) file's start."""
    byte = error.object[error.start]
    return InputError(
        f"{path} is not UTF-8: byte 0x{byte:02x} at offset {offset} ({error.reason}); "
        "convert the file to UTF-8 first"
    )


def text_lines(path: Path, where: Callable[[int], str]) -> Iterator[tuple[int, str]]:
    """The number, from 1, and the text of each line of JSON that is not blank.

    `where(n)` names line n. Raises `InputError` for a line without end, or one that is not UTF-8.
    """
    offset = 0
    with open_bytes(path) as file:
        for number, raw in json_lines(file, where):
            try:
                line = raw.decode()
            except UnicodeDecodeError as error:
                raise not_utf8(path, offset + error.start, error) from error
            offset += len(raw)
            line = line.removeprefix("\ufeff") if number == 1 else line
            if line.strip():
                yield number, line


def decode_python(raw: bytes) -> str:
    """Python source decoded by the language's own rule: the declared encoding, else UTF-8.

    Raises `SyntaxError` for an unknown encoding and `UnicodeDecodeError` for bytes that are not it.
    """
    encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
    return raw.decode(encoding)


def read_text(path: Path) -> str:
    """The whole of a text file, its line ends as they are, without a byte-order mark."""
    return "".join(text_chunks(path))


def text_chunks(path: Path) -> Iterator[str]:
    """A text file in pieces of about 64 kB of decoded text; raises `InputError` as it reads."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    start = True
    offset = 0
    with open_bytes(path) as file:
        while True:
            chunk = file.read(_CHUNK)
            waiting = len(decoder.getstate()[0])
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                raise not_utf8(path, offset - waiting + error.start, error) from error
            offset += len(chunk)
            if start and text:
                text = text.removeprefix("\ufeff")
                start = False
            if text:
                yield text
            if not chunk:
                return


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

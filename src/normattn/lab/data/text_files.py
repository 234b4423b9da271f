"""Files of text: opened and decoded so that every mistake is one sentence that names the file."""

from __future__ import annotations

import codecs
import gzip
import io
import tokenize
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

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
    """The documents of one file: of a table its rows, of JSON lines its lines, of text pieces.

    `field` is the column or key that holds the text. Raises `InputError` as the file is read.
    """
    suffix = suffix_of(path)
    if suffix in TABLES:
        return read_table(path, name, field)
    if suffix in LINES:
        return read_json_lines(path, name, field)
    texts = enumerate(pieces(text_chunks(path), PIECE_CHARACTERS))
    return (Document(f"{name}#{index:05}", text) for index, text in texts)


def read_json_lines(path: Path, name: str, field: str) -> Iterator[Document]:
    """Documents `name:1`, `name:2`, … (line numbers); blank lines are passed over.

    Raises `InputError` naming file and line where a line is no JSON object with a text `field`.
    """
    for number, line in text_lines(path, lambda n: f"{path}:{n}"):
        where = f"{path}:{number}"
        value = parse_json(line, where)
        if not isinstance(value, dict):
            raise InputError(f"{where} is not a JSON object but a {type(value).__name__}")
        text = value.get(field)
        if field not in value:
            fields = ", ".join(map(repr, value)) or "none"
            raise InputError(
                f"{where} has no field {field!r} (its fields: {fields}); choose with ?field="
            )
        if not isinstance(text, str):
            raise InputError(f"{where}: field {field!r} is not text but a {type(text).__name__}")
        yield Document(f"{name}:{number}", without_surrogates(text))


def read_table(path: Path, name: str, field: str) -> Iterator[Document]:
    """Documents `name:0`, `name:1`, … (row numbers) of a Parquet, CSV or TSV file.

    Read in batches by polars: of Parquet some row groups are held at a time. Raises `InputError`
    where the file is damaged, or its column is missing or holds something else than text in UTF-8.
    """
    row = 0
    with open_file(path):  # says in words what is no regular file
        pass
    try:
        frame = _scanned(path)
        schema = frame.collect_schema()
        if field not in schema:
            columns = ", ".join(map(repr, schema)) or "none"
            raise InputError(
                f"{path} has no column {field!r} (its columns: {columns}); choose with ?field="
            )
        if schema[field] != pl.String:
            kind = str(schema[field]).lower()
            raise InputError(f"{path}: column {field!r} is not text but {kind}")
        batches = frame.select(field).collect_batches(chunk_size=_ROWS, maintain_order=True)
        for batch in batches:
            for text in batch.to_series():
                if text is None:
                    raise InputError(f"{path}, row {row}: column {field!r} has no value")
                yield Document(f"{name}:{row}", text)
                row += 1
    except (pl.exceptions.PolarsError, OSError, UnicodeDecodeError) as error:
        first = (str(error).strip().splitlines() or ["damaged"])[0]
        kind = suffix_of(path).removeprefix(".")
        raise InputError(f"{path} cannot be read as {kind}, from row {row}: {first}") from error


def _scanned(path: Path) -> pl.LazyFrame:
    if suffix_of(path) == ".parquet":
        return pl.scan_parquet(path, glob=False)
    separator = "\t" if suffix_of(path) == ".tsv" else ","
    return pl.scan_csv(path, separator=separator, infer_schema=False, glob=False)


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


def without_surrogates(text: str) -> str:
    """The text with a question mark for what is no Unicode."""
    # A lone surrogate (\ud800) is legal JSON but no Unicode text.
    return text.encode("utf-8", "replace").decode()


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

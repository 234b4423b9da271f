"""Opening and decoding files so that every mistake becomes one sentence that names the file."""

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

from normattn.errors import InputError
from normattn.files import open_file
from normattn.structured import json_lines

_CHUNK = 1 << 16


def is_packed(path: Path) -> bool:
    """Whether a file is gzip's by its name, in letters of either case."""
    return path.suffix.lower() == ".gz"


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

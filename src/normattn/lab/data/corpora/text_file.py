"""Plain text, UTF-8: a large file is cut at line ends into documents of about 32 kB."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from normattn.lab.data.corpora.corpus import Document
from normattn.lab.data.corpora.formats import FileFormat, register_format
from normattn.lab.data.corpora.reading import pieces, read_text, text_chunks

PIECE_CHARACTERS = 1 << 15
SUFFIXES = frozenset(
    {".txt", ".text", ".md", ".rst", ".tex", ".org", ".adoc", ".html", ".xml", ".csv", ".tsv"}
    | {".log", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java"}
    | {".js", ".ts", ".rb", ".pl", ".lua", ".sh", ".sql", ".toml", ".yaml", ".yml", ".ini"}
    | {".cfg", ".en", ".de"}
)


def read_pieces(path: Path, name: str, field: str) -> Iterator[Document]:
    """Documents `name#00000`, `name#00001`, … of at most 32,768 characters; `field` is unused."""
    for index, text in enumerate(pieces(text_chunks(path), PIECE_CHARACTERS)):
        yield Document(f"{name}#{index:05}", text)


TEXT = register_format(FileFormat("text", SUFFIXES, False, read_pieces, whole=read_text))

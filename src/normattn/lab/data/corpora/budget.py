"""Reading only part of a corpus: which part a limit in bytes keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from normattn.lab.data.corpora.corpus import Document

File = TypeVar("File")


def spread(sizes: Sequence[int], limit: int | None) -> list[bool]:
    """Which of several files to read so that about `limit` bytes come evenly from all of them.

    A file is kept while what is kept lags behind its share of what was passed (error diffusion),
    so the choice is deterministic and does not favour the start of the alphabet. At least one
    file is kept when there is any: `capped` then cuts it.
    """
    total = sum(sizes)
    if limit is None or total <= limit:
        return [True] * len(sizes)
    seen = kept = 0
    keep = []
    for size in sizes:
        chosen = kept * total <= limit * seen and kept + size <= limit
        keep.append(chosen)
        kept += size if chosen else 0
        seen += size
    if keep and not any(keep):
        keep[0] = True
    return keep


def shares(sizes: Sequence[int], limit: int | None) -> list[int]:
    """How many bytes of each of several files to read, so that `limit` comes evenly from all.

    Files of up to a sixteenth of the limit are read as `spread` says, whole or not. Of a larger one
    what is due with it, at least a sixteenth: one large file among small ones is cut, not passed
    over. So at most a sixteenth of the limit is left unused. Installed packages are
    chosen by `spread` alone: published results are of the files that it keeps.
    """
    total = sum(sizes)
    if limit is None or total <= limit:
        return list(sizes)
    least = max(1, limit // 16)
    seen = kept = 0
    parts = []
    for size in sizes:
        behind = kept * total <= limit * seen
        seen += size
        due = limit * seen // total - kept
        if size <= least:
            parts.append(size if behind and kept + size <= limit else 0)
        else:
            parts.append(min(size, due) if due >= least else 0)
        kept += parts[-1]
    return parts


def evenly(files: Sequence[File], sizes: Sequence[int], limit: int | None) -> list[File]:
    """The files that `spread` keeps of those of these sizes."""
    return [file for file, kept in zip(files, spread(sizes, limit), strict=True) if kept]


def capped(documents: Iterable[Document], limit: int | None) -> Iterator[Document]:
    """The first `limit` bytes of the documents; the last one is cut behind a line if it can."""
    left = limit
    for document in documents:
        if left is None:
            yield document
            continue
        raw = document.text.encode()
        if len(raw) <= left:
            left -= len(raw)
            yield document
            continue
        head = raw[:left].decode(errors="ignore")
        text = head[: head.rfind("\n") + 1] or head
        if text:
            yield replace(document, text=text)
        return

"""Which texts are nearly those that came before: MinHash over lines, by the library datasketch."""

from __future__ import annotations

import zlib
from typing import Any

from normattn.errors import library

THRESHOLD = 0.7
PERMUTATIONS = 64


LACKING = (
    "python-packages leaves out near-duplicates with the datasketch library, which is not "
    "installed: pip install 'normattn[data]', or take python-packages-2026, which needs none"
)


class NearDuplicates:
    """Remembers the texts it was shown; two are alike above a Jaccard similarity of their lines.

    A line counts once, without the space around it, and an empty one not at all. Similarity is
    estimated from 64 MinHashes: an estimate of 0.7 or more, at a deviation of about 0.06, makes a
    duplicate. The same texts in the same order always give the same answers. Raises `InputError`
    where datasketch is not installed.
    """

    def __init__(self) -> None:
        datasketch = library("datasketch", LACKING)
        self._new_hash: Any = datasketch.MinHash
        self._index = datasketch.MinHashLSH(threshold=THRESHOLD, num_perm=PERMUTATIONS)
        self._shown: list[Any] = []

    def seen(self, text: str) -> bool:
        """Whether a text like this one was shown before; if not, it is remembered."""
        lines = {line.strip() for line in text.splitlines()} - {""}
        own = self._new_hash(num_perm=PERMUTATIONS, hashfunc=zlib.crc32)
        own.update_batch([line.encode("utf-8", "replace") for line in sorted(lines)])
        if any(own.jaccard(self._shown[key]) >= THRESHOLD for key in self._index.query(own)):
            return True
        self._index.insert(len(self._shown), own)
        self._shown.append(own)
        return False

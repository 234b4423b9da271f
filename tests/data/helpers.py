"""Small corpora and splits that the tests build by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from normattn.lab.data.tokens import TokenSplit


def make_split(lengths: Sequence[int], dtype: type = np.uint16) -> TokenSplit:
    """Documents of the given lengths; token values count up, so a window shows its place."""
    offsets = np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64) + 1)])
    tokens = np.arange(1, offsets[-1] + 1, dtype=dtype)
    tokens[offsets[1:] - 1] = 0
    names = [f"doc{i}" for i in range(len(lengths))]
    return TokenSplit("test", tokens, offsets.astype(np.int64), names)


def write_folder(folder: Path, count: int = 40) -> Path:
    """A folder of small text files with different, repetitive content."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        lines = [f"line {j} of file {i}: the quick brown fox {i * j}\n" for j in range(20)]
        (folder / f"f{i:03}.txt").write_text("".join(lines), encoding="utf-8")
    return folder

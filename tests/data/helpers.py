"""Small corpora and splits that the tests build by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from normattn.lab.data.images import ImageSplit
from normattn.lab.data.sources import SPLITS
from normattn.lab.data.tokeniser import Tokeniser
from normattn.lab.data.tokens import TokenData, TokenSplit


def make_split(lengths: Sequence[int], dtype: type = np.uint16) -> TokenSplit:
    """Documents of the given lengths; token values count up, so a window shows its place."""
    offsets = np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64) + 1)])
    tokens = np.arange(1, offsets[-1] + 1, dtype=dtype)
    tokens[offsets[1:] - 1] = 0
    names = [f"doc{i}" for i in range(len(lengths))]
    return TokenSplit("test", tokens, offsets.astype(np.int64), names)


def make_images(count: int) -> ImageSplit:
    """Images of 4 by 4; image i has the label i."""
    pixels = np.random.default_rng(1).integers(0, 256, (count, 4, 4, 1), dtype=np.uint8)
    names = tuple(map(str, range(count)))
    return ImageSplit("train", pixels, np.arange(count, dtype=np.int64), names)


def token_data(texts: Sequence[str], tokeniser: Tokeniser) -> TokenData:
    """Every split holds these texts, named by their numbers."""
    rows = [[*tokeniser.encode(text), 0] for text in texts]
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int64)
    tokens = np.concatenate([np.array(row, dtype=np.uint16) for row in rows])
    names = [f"document {n}" for n in range(len(rows))]
    splits: Any = {name: TokenSplit(name, tokens, offsets, names) for name in SPLITS}
    size = tokeniser.vocab_size
    return TokenData(**splits, tokeniser=tokeniser, vocab_size=size, fingerprint="made")


def write_folder(folder: Path, count: int = 40) -> Path:
    """A folder of small text files with different, repetitive content."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        lines = [f"line {j} of file {i}: the quick brown fox {i * j}\n" for j in range(20)]
        (folder / f"f{i:03}.txt").write_text("".join(lines), encoding="utf-8")
    return folder

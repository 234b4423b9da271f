"""Sentence pairs small enough for tests, and an installed package that carries a catalogue."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from pathlib import Path

WORDS = {
    "a": "ein",
    "the": "der",
    "dog": "Hund",
    "bird": "Vogel",
    "man": "Mann",
    "sees": "sieht",
    "hears": "hört",
    "likes": "mag",
    "old": "alte",
    "small": "kleine",
    "and": "und",
    "house": "Haus",
}


def sentences(count: int, longest: int = 9, seed: int = 0) -> list[tuple[str, str]]:
    """Random word-by-word translations of 2 to `longest` words."""
    generator = random.Random(seed)
    found = []
    for _ in range(count):
        chosen = generator.choices(list(WORDS), k=generator.randint(2, longest))
        found.append((" ".join(chosen), " ".join(WORDS[word] for word in chosen)))
    return found


def write_lines(
    folder: Path, pairs: list[tuple[str, str]], name: str = "train"
) -> tuple[Path, Path]:
    """The pairs as two aligned files, `NAME.en` and `NAME.de`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / f"{name}.en", folder / f"{name}.de"
    for side, path in enumerate(paths):
        path.write_text("".join(pair[side] + "\n" for pair in pairs), encoding="utf-8")
    return paths


def multi_layout(folder: Path, train: int = 60, held_out: int = 8) -> Path:
    """A folder of train, val and test files."""
    write_lines(folder, sentences(train, seed=1))
    write_lines(folder, sentences(held_out, seed=2), "val")
    write_lines(folder, sentences(held_out, seed=3), "test_small")
    return folder


def machine_object(messages: Mapping[str, str]) -> bytes:
    """A GNU .mo file, as gettext's manual describes it."""
    whole = {"": "Content-Type: text/plain; charset=UTF-8\n", **messages}
    keys = sorted(key.encode() for key in whole)
    values = [whole[key.decode()].encode() for key in keys]
    start = 28 + 16 * len(keys)
    tables, content = b"", b""
    for texts in (keys, values):
        for text in texts:
            tables += struct.pack("<2I", len(text), start + len(content))
            content += text + b"\0"
    head = struct.pack("<7I", 0x950412DE, 0, len(keys), 28, 28 + 8 * len(keys), 0, 0)
    return head + tables + content


def install(site: Path, package: str, messages: Mapping[str, str], language: str = "de") -> None:
    """Lay a package with a catalogue out as an installer does."""
    file = f"{package}/locale/{language}/LC_MESSAGES/{package}.mo"
    (site / file).parent.mkdir(parents=True)
    (site / file).write_bytes(machine_object(messages))
    info = site / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "RECORD").write_text(f"{file},,\n{info.name}/METADATA,,\n")

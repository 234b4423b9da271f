"""Small corpora and splits that the tests build by hand."""

from __future__ import annotations

import json
import random
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from normattn.lab.data.images import ImageSplit
from normattn.lab.data.sources import SPLITS
from normattn.lab.data.tokeniser import Tokeniser
from normattn.lab.data.tokens import TokenData, TokenSplit

# A hub, texts and images.

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def fake_hub(
    monkeypatch: pytest.MonkeyPatch, load: Any, commit: str = COMMIT, splits: Sequence[str] = ()
) -> None:
    """The libraries `datasets`, which loads by `load`, and `huggingface_hub`, at `commit`."""

    def dataset_info(name: str, revision: str | None) -> Any:
        if name == "offline":
            raise ConnectionError("no route to host\nand much more")
        return SimpleNamespace(sha=commit)

    api = SimpleNamespace(dataset_info=dataset_info)
    names = {"load_dataset": load, "get_dataset_split_names": lambda *_, **__: [*splits]}
    for library, holds in {"datasets": names, "huggingface_hub": {"HfApi": lambda: api}}.items():
        module = ModuleType(library)
        module.__dict__.update(holds)
        monkeypatch.setitem(sys.modules, library, module)


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


# Sentence pairs, and an installed package that carries a catalogue.

ENGLISH = "a the dog bird man sees hears likes old small and house"
GERMAN = "ein der Hund Vogel Mann sieht hört mag alte kleine und Haus"
WORDS = dict(zip(ENGLISH.split(), GERMAN.split(), strict=True))


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
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / f"{name}.en", folder / f"{name}.de"
    for side, path in enumerate(paths):
        path.write_text("".join(pair[side] + "\n" for pair in pairs), encoding="utf-8")
    return paths


def multi_layout(folder: Path, train: int = 60, held_out: int = 8) -> Path:
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


# Relations.

NAMES = ("train_triples.json", "dev_triples.json", "test_triples.json")


def item(text: str, *relations: str) -> dict[str, Any]:
    """One document in the NYT24 form."""
    triples = [["someone", relation, "something"] for relation in relations]
    return {"text": text, "triple_list": triples}


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def write_relations(folder: Path, names: tuple[str, ...] = NAMES, count: int = 8) -> Path:
    """Three splits whose labels can be read off the words; `unseen` occurs in the test alone."""
    people, places = ("Ada", "Kurt", "Emmy", "Alan"), ("London", "Rome")
    for number, name in enumerate(names):
        items = []
        for i in range(count if number == 0 else count // 2):
            who, where = people[i % 4], places[i % 2]
            if i % 2:
                items.append(item(f"{who} was born in {where} , number {i} {number} .", "born"))
            else:
                said = f"{who} lived near {where} and was born there , {i} {number} ."
                items.append(item(said, "born", "lived"))
        if number == 2:
            items.append(item("Nobody has seen this .", "unseen"))
        if name.endswith(".jsonl"):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("\n".join(map(json.dumps, items)), encoding="utf-8")
        else:
            write_json(folder / name, items)
    return folder

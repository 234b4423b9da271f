"""Images, catalogues, studies, pages and prompts from damaged or endless files: one sentence."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Imported here: that takes longer than an answer may.
import normattn.lab.sweep.study  # noqa: F401
from data.pairs_helpers import machine_object
from normattn.errors import InputError
from normattn.models.pretrained import load_model

Damage = Callable[[bytes], bytes]


def _flipped(at: float) -> Damage:
    """Four bytes that are others, at a share of the file."""

    def damage(content: bytes) -> bytes:
        place = int(len(content) * at)
        return content[:place] + bytes(255 - b for b in content[place : place + 4]) + content[
            place + 4 :
        ]  # fmt: skip

    return damage


DAMAGES: dict[str, Damage] = {
    "cut": lambda content: content[: len(content) // 2],
    "emptied": lambda content: b"",
    "flipped at the start": _flipped(0.1),
    "flipped in the middle": _flipped(0.5),
    "flipped at the end": _flipped(0.9),
    "without its end": lambda content: content[:-8],
    "a zip's beginning": lambda content: b"PK\x03\x04" + content[4:60],
}


def _refused(path: Path, read: Callable[[], object], same: Callable[[Any], bool]) -> None:
    """Refused by name, or the same as ever."""
    try:
        kept = same(read())
    except InputError as error:
        kept = path.name in str(error)
    assert kept


PIXELS = np.arange(2 * 64, dtype=np.uint8).reshape(2, 8, 8)


def _chunk(kind: bytes, content: bytes) -> bytes:
    sealed = kind + content
    return len(content).to_bytes(4, "big") + sealed + zlib.crc32(sealed).to_bytes(4, "big")


@pytest.mark.parametrize("damage", [*DAMAGES, "an endless size", "a broken chunk"])
def test_a_damaged_picture_is_refused_by_name(damage: str, tmp_path: Path) -> None:
    from PIL import Image

    from normattn.lab.data.images import ImageDataConfig, image_shape

    path = tmp_path / "cats" / "one.png"
    path.parent.mkdir()
    Image.fromarray(PIXELS[0]).save(path)
    content = path.read_bytes()
    if damage == "an endless size":
        size = _chunk(b"IHDR", (30_000).to_bytes(4, "big") * 2 + b"\x08\0\0\0\0")
        path.write_bytes(content[:8] + size + content[33:])
    elif damage == "a broken chunk":
        path.write_bytes(content[:33] + b"\0\0\0\4\0\0\0\0" + content[33:])
    else:
        path.write_bytes(DAMAGES[damage](content))
    for number in range(2, 40):
        shutil.copy(path, path.with_name(f"{number}.png"))
    read = lambda: image_shape(ImageDataConfig(source=str(tmp_path)))  # noqa: E731
    _refused(path.parent, read, lambda found: found.height == 8)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_catalogue_is_refused_by_name(damage: str, tmp_path: Path) -> None:
    from normattn.lab.data.pair_sources import messages

    path = tmp_path / "some.mo"
    whole = machine_object({"hour": "Stände"})
    path.write_bytes(whole)
    assert dict(messages(path)) == {"hour": "Stände"}
    path.write_bytes(DAMAGES[damage](whole))
    _refused(path, lambda: dict(messages(path)), lambda found: True)


@pytest.mark.parametrize(
    "content", [b"STUDY = Study(", b"\0\0", b"x = '\xff'", b"[" * 500, b"x = " + b"9" * 5000]
)
def test_a_study_that_is_no_python_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    from normattn.lab.studies import find_typed

    path = tmp_path / "mine.py"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"mine\.py"):
        find_typed(str(path))


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}", "[1]", "", "{}"])
def test_settings_beside_a_page_are_refused_by_name(content: str, tmp_path: Path) -> None:
    from normattn.cli.reporting import _configuration

    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=r"config\.json"):
        _configuration(tmp_path)


def test_files_without_an_end_are_refused_at_once(tmp_path: Path) -> None:
    from normattn.lab.data.images import ImageDataConfig, image_shape
    from normattn.lab.data.tokeniser import Tokeniser

    def pipe(name: str) -> Path:
        place = tmp_path / name
        place.parent.mkdir(exist_ok=True)
        os.mkfifo(place)
        return place

    reading: dict[Path, Callable[[], object]] = {
        pipe("cats/one.png"): lambda: image_shape(ImageDataConfig(source=str(tmp_path))),
        pipe("tokeniser.json"): lambda: Tokeniser.load(tmp_path / "tokeniser.json"),
    }
    for path, read in reading.items():
        with pytest.raises(InputError, match="a named pipe"):
            read()
        assert path.exists()


def test_a_folder_in_place_of_the_losses_is_refused_by_name(tmp_path: Path) -> None:
    from normattn.lab.sweep.collect import measured_below
    from normattn.lab.sweep.layout import CellPaths

    paths = CellPaths.of(tmp_path, "KNA", 0)
    paths.job.mkdir(parents=True)
    paths.settings.write_text('{"variant": "KNA", "seed": 0}')
    (paths.run / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(InputError, match=r"metrics\.jsonl"):
        measured_below(tmp_path)


@pytest.mark.parametrize("form", [["normattn-classifier"], {"a": 1}, None])
def test_a_model_whose_format_is_no_name_is_refused(tmp_path: Path, form: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"format": form, "config": {}}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"config\.json does not describe a model of a format"):
        load_model(tmp_path)

"""A damaged or hostile model of transformers: one sentence that names it, and no memory taken."""

from __future__ import annotations

import resource
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("gguf")

from hf.test_gguf import _write
from normattn.errors import InputError
from normattn.hf import from_pretrained, load

from .foreign import MODELS, SHARDED, Damage, configured, copy_of, cut, write_model, written

MEMORY = 2 << 30
"""What may be allocated beyond what is held when a test begins."""


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "whole"
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "sharded"
    write_model(folder, shards=True)
    return folder


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "packed"
    folder.mkdir()
    _write(folder / "tiny.gguf", [*map(chr, range(33, 97)), '!"'])
    return folder


def _refused(place: Path, gguf: str | None = None) -> str:
    with pytest.raises(InputError) as caught:
        load(place, gguf)
    said = str(caught.value)
    assert place.name in said or (gguf is not None and gguf in said)
    assert len(said) < 1000
    assert not (place / "executed").exists()
    return said


@pytest.mark.parametrize("damage", MODELS)
def test_a_damaged_model_is_refused_by_name(damage: str, whole: Path, tmp_path: Path) -> None:
    _refused(copy_of(whole, tmp_path / "hostile-model", MODELS[damage]))


@pytest.mark.parametrize("damage", SHARDED)
def test_damaged_shards_are_refused_by_name(damage: str, sharded: Path, tmp_path: Path) -> None:
    _refused(copy_of(sharded, tmp_path / "hostile-model", SHARDED[damage]))


def _counts(tensors: int, values: int) -> Damage:
    def damage(folder: Path) -> None:
        content = (folder / "tiny.gguf").read_bytes()
        changed = content[:8] + struct.pack("<QQ", tensors, values) + content[24:]
        (folder / "tiny.gguf").write_bytes(changed)

    return damage


def _blocks(count: int, key: bytes = b"llama.block_count") -> Damage:
    def damage(folder: Path) -> None:
        content = (folder / "tiny.gguf").read_bytes()
        place = content.index(key) + len(key) + 4
        changed = content[:place] + struct.pack("<I", count) + content[place + 4 :]
        (folder / "tiny.gguf").write_bytes(changed)

    return damage


PACKED: dict[str, Damage] = {
    "empty": written("tiny.gguf", b""),
    "cut": cut("tiny.gguf", 0.9),
    "tensors without end": _counts(1 << 60, 5),
    "layers without end": _blocks(100_000_000),
    "width without end": _blocks(10**9, b"llama.embedding_length"),
    "no head": _blocks(0, b"llama.attention.head_count"),
}


@pytest.mark.parametrize("damage", PACKED)
def test_a_damaged_gguf_is_refused_by_name(damage: str, packed: Path, tmp_path: Path) -> None:
    _refused(copy_of(packed, tmp_path / "hostile-model", PACKED[damage]), "tiny.gguf")


def test_a_whole_model_is_read_from_either_form(whole: Path, sharded: Path, packed: Path) -> None:
    for folder, name in ((whole, None), (sharded, None), (packed, "tiny.gguf")):
        load(folder, name)


@pytest.mark.parametrize(
    "record", [{"method": 1, "train_length": 8}, {"method": "PI", "train_length": "8"}, 3]
)
def test_a_damaged_record_of_an_extension_is_refused(
    record: object, whole: Path, tmp_path: Path
) -> None:
    place = copy_of(whole, tmp_path / "extended", configured(normattn=record))
    with pytest.raises(InputError, match="extended"):
        from_pretrained(str(place))

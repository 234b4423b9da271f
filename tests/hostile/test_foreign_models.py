"""A damaged or hostile model of transformers: one sentence that names it, and no memory taken."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gguf")

from hf.test_gguf import write
from normattn.errors import InputError
from normattn.hf import from_pretrained, load

from .foreign import MODELS, SHARDED, Damage, changed, configured, copy_of, cut, write_model

pytestmark = pytest.mark.usefixtures("little_memory")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model in one file, in shards, and as a GGUF file."""
    places = {name: tmp_path_factory.mktemp("models") / name for name in ("whole", "sharded")}
    for name, folder in places.items():
        write_model(folder, shards=name == "sharded")
    packed = tmp_path_factory.mktemp("packed")
    write(packed / "tiny.gguf", [*map(chr, range(33, 97)), '!"'])
    return {**places, "packed": packed}


def _assert_refused(place: Path, gguf: str | None = None) -> None:
    """One sentence names the model, and none of its code is run."""
    with pytest.raises(InputError) as caught:
        load(place, gguf)
    said = str(caught.value)
    assert place.name in said or (gguf is not None and gguf in said)
    assert len(said) < 1000
    assert not (place / "executed").exists()


@pytest.mark.parametrize("damage", [*MODELS, *SHARDED])
def test_a_damaged_model_is_refused(damage: str, models: dict[str, Path], tmp_path: Path) -> None:
    source = models["whole" if damage in MODELS else "sharded"]
    _assert_refused(copy_of(source, tmp_path / "hostile-model", {**MODELS, **SHARDED}[damage]))


def _counts(tensors: int, values: int) -> Damage:
    numbers = struct.pack("<QQ", tensors, values)
    return changed("tiny.gguf", lambda content: content[:8] + numbers + content[24:])


def _blocks(count: int, key: bytes = b"llama.block_count") -> Damage:
    def change(content: bytes) -> bytes:
        place = content.index(key) + len(key) + 4
        return content[:place] + struct.pack("<I", count) + content[place + 4 :]

    return changed("tiny.gguf", change)


PACKED: dict[str, Damage] = {
    "empty": cut("tiny.gguf", 0),
    "cut": cut("tiny.gguf", 0.9),
    "tensors without end": _counts(1 << 60, 5),
    "layers without end": _blocks(100_000_000),
    "width without end": _blocks(10**9, b"llama.embedding_length"),
    "no head": _blocks(0, b"llama.attention.head_count"),
}


@pytest.mark.parametrize("damage", PACKED)
def test_a_damaged_gguf_is_refused(damage: str, models: dict[str, Path], tmp_path: Path) -> None:
    _assert_refused(copy_of(models["packed"], tmp_path / "hostile", PACKED[damage]), "tiny.gguf")


def test_a_whole_model_is_read_from_every_form(models: dict[str, Path]) -> None:
    for name, folder in models.items():
        model, _ = load(folder, "tiny.gguf" if name == "packed" else None)
        assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


@pytest.mark.parametrize(
    "record", [{"method": 1, "train_length": 8}, {"method": "PI", "train_length": "8"}, 3]
)
def test_a_damaged_record_of_an_extension_is_refused(
    record: object, models: dict[str, Path], tmp_path: Path
) -> None:
    place = copy_of(models["whole"], tmp_path / "extended", configured(normattn=record))
    with pytest.raises(InputError, match="extended"):
        from_pretrained(str(place))

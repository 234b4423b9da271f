"""A small model of transformers on disk, and what a damaged or hostile copy of it looks like."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

WEIGHTS, CONFIG = "model.safetensors", "config.json"
INDEX = f"{WEIGHTS}.index.json"
Damage = Callable[[Path], None]


def write_model(folder: Path, shards: bool = False, **settings: Any) -> None:
    """A Llama of two layers with random weights, whose tokens are bytes."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**{"tie_word_embeddings": False, **sizes, **settings})
    model: Any = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="20KB" if shards else "5GB")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    kind: Any = transformers.PreTrainedTokenizerFast
    kind(tokenizer_object=made).save_pretrained(folder)


def copy_of(folder: Path, place: Path, damage: Damage) -> Path:
    shutil.copytree(folder, place)
    damage(place)
    return place


def changed(name: str, change: Callable[[bytes], bytes]) -> Damage:
    """A file whose content is another."""

    def damage(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


def written(name: str, content: bytes) -> Damage:
    return changed(name, lambda _: content)


def cut(name: str, share: float) -> Damage:
    return changed(name, lambda content: content[: int(len(content) * share)])


def edited(name: str, change: Callable[[Any], object]) -> Damage:
    """A JSON file whose value is changed in place."""

    def other(content: bytes) -> bytes:
        value = json.loads(content)
        change(value)
        return json.dumps(value).encode()

    return changed(name, other)


def configured(**settings: Any) -> Damage:
    return edited(CONFIG, lambda value: value.update(settings))


def _lacking(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["spare"] = torch.zeros(100_000)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def _only_pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def _header(value: Any, length: int | None = None) -> bytes:
    text = json.dumps(value).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


class Payload:
    """A pickle that leaves a file where it is executed."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def pickled(name: str) -> Damage:
    """A pickle under that name, which would leave `executed` beside it."""

    def damage(folder: Path) -> None:
        (folder / name).write_bytes(pickle.dumps(Payload(folder / "executed")))

    return damage


HUGE = {"F32": [1 << 31, 1 << 31], "F64": [1 << 62]}
MODELS: dict[str, Damage] = {
    "weights cut": cut(WEIGHTS, 0.6),
    "weights pickled": pickled(WEIGHTS),
    "weights of absurd header": written(WEIGHTS, struct.pack("<Q", 1 << 62) + b"{}"),
    "weights of absurd shapes": written(
        WEIGHTS,
        _header({k: {"dtype": k, "shape": v, "data_offsets": [0, 8]} for k, v in HUGE.items()}),
    ),
    "a weight missing": _lacking,
    "only pickled weights": _only_pickled,
    "configuration deep": written(CONFIG, b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "configuration of own code": configured(auto_map={"AutoConfig": "own.Own"}, model_type="own"),
    "layers without end": configured(num_hidden_layers=100_000_000),
    "width without end": configured(hidden_size=10**9),
    "heads without end": configured(num_attention_heads=10**9),
    "width as text": configured(hidden_size="32"),
    "another width": configured(hidden_size=64),
    "rope as text": configured(rope_parameters="default"),
    "tokeniser deep": written("tokenizer.json", b"[" * 100_000),
    "tokeniser pickled": pickled("tokenizer.json"),
}


def _first_outside(index: Any) -> None:
    """Its first tensor is in the folder above."""
    index["weight_map"][next(iter(index["weight_map"]))] = "../other/model.safetensors"


def lost_shard(folder: Path) -> None:
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


SHARDED: dict[str, Damage] = {
    "index deep": written(INDEX, b"[" * 100_000),
    "index without files": written(INDEX, b"{}"),
    "index to the folder above": edited(INDEX, _first_outside),
    "shard missing": lost_shard,
}

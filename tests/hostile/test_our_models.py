"""A damaged or hostile model of ours: one sentence that names the file, and no memory taken."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from normattn.errors import InputError
from normattn.models import CausalLM, CausalLMConfig
from normattn.models.pretrained import load_any, save_model

pytestmark = pytest.mark.usefixtures("little_memory")


def _saved(place: Path, score: str = "QKRMSNorm") -> Path:
    sizes: dict[str, Any] = {"vocab_size": 20, "dim": 16, "layers": 2, "heads": 2}
    rest: dict[str, Any] = {"train_length": 8, "score": score, "tie_head": False}
    config = CausalLMConfig(**sizes, **rest)
    save_model(CausalLM(config), place)
    return place


def _rewrite(place: Path, **changed: Any) -> None:
    """Another configuration, with every digest in it put right."""
    file = place / "config.json"
    description = json.loads(file.read_text())
    description["config"] |= changed
    for name in [name for name in description if name.startswith("config_")]:
        del description[name]
    file.write_text(json.dumps(description))


SIZES: list[dict[str, Any]] = [
    {"dim": 10**9},
    {"vocab_size": 2**63},
    {"layers": 10**8, "shared_layers": True},
    {"heads": 0},
    {"dim": 16.5},
    {"train_length": 10**12, "score": "Baseline"},
    {"score": "KNA@" + "9" * 5000},
]


@pytest.mark.parametrize("changed", SIZES, ids=lambda changed: str(changed)[:60])
def test_other_sizes_are_refused_or_harmless(changed: dict[str, Any], tmp_path: Path) -> None:
    place = _saved(tmp_path / "model")
    _rewrite(place, **changed)
    try:
        load_any(place)
    except InputError as error:
        said = str(error)
        assert "model" in said
        assert len(said) < 1000
    else:
        assert "train_length" in changed or "norm_eps" in changed


def _weights(place: Path, content: bytes) -> None:
    file = place / "config.json"
    description = json.loads(file.read_text())
    description["weights_sha256"] = hashlib.sha256(content).hexdigest()
    file.write_text(json.dumps(description))
    (place / "model.safetensors").write_bytes(content)


def _integers(place: Path) -> None:
    tensors = safetensors.torch.load_file(place / "model.safetensors")
    changed = {name: tensor.to(torch.int64) for name, tensor in tensors.items()}
    _weights(place, safetensors.torch.save(changed))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": lambda place: _weights(place, b""),
    "pickled": lambda place: _weights(place, pickle.dumps([1])),
    "absurd header": lambda place: _weights(place, b"\xff" * 64),
    "cut": lambda place: _weights(place, (place / "model.safetensors").read_bytes()[:-40]),
    "whole numbers": _integers,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_with_a_right_digest_are_read_with_care(damage: str, tmp_path: Path) -> None:
    place = _saved(tmp_path / "model")
    DAMAGES[damage](place)
    with pytest.raises(InputError, match=r"model\.safetensors"):
        load_any(place)

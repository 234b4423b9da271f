"""Saved models: the round trip, and every kind of damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from normattn.errors import InputError
from normattn.models.causal_lm import CausalLM
from normattn.models.config import CausalLMConfig
from normattn.models.pretrained import load_model, save_model


def _model(**changes: Any) -> CausalLM:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"vocab_size": 20, "dim": 16, "layers": 2, "train_length": 8}
    return CausalLM(CausalLMConfig(**(settings | changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"heads": 2, "score": "KNA-logn"},
        {"block": "gau", "key_size": 8, "placement": "DeepNorm", "score": "CosA"},
        {"tie_head": False, "score": "QKRMSNorm", "placement": "ReZero"},
    ],
)
def test_a_model_comes_back_bit_by_bit(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = _model(**changes)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    save_model(model, tmp_path / "model")
    before = torch.random.get_rng_state()
    loaded = load_model(tmp_path / "model")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert loaded.config == model.config
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    ids = torch.randint(0, 20, (2, 12))
    assert torch.equal(loaded(ids), model(ids))
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert (loaded.head_weight is loaded.embedding.weight) == model.config.tie_head


def test_saving_twice_writes_the_same_bytes_and_replaces_the_first(tmp_path: Path) -> None:
    place = tmp_path / "model"
    save_model(_model(), place)
    first = {file.name: file.read_bytes() for file in place.iterdir()}
    with (model := _model()).using("NTK", factor=4):
        save_model(model, place)
    assert {file.name: file.read_bytes() for file in place.iterdir()} == first
    assert sorted(first) == ["config.json", "model.safetensors"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match=r"thesis\.txt"):
        save_model(_model(), tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(InputError, match="is a file"):
        save_model(_model(), tmp_path / "thesis.txt")


def _edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(place: Path) -> None:
        path = place / "config.json"
        description = json.loads(path.read_text())
        change(description)
        path.write_text(json.dumps(description))

    return damage


def _flip(place: Path) -> None:
    content = bytearray((place / "model.safetensors").read_bytes())
    content[-7] ^= 1
    (place / "model.safetensors").write_bytes(bytes(content))


def _cut(name: str) -> Callable[[Path], None]:
    def damage(place: Path) -> None:
        path = place / name
        path.write_bytes(path.read_bytes()[:-20])

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda place: (place / "config.json").unlink(), r"config\.json does not exist"),
        (lambda place: (place / "model.safetensors").unlink(), "safetensors does not exist"),
        (_cut("config.json"), "not valid JSON"),
        (lambda place: (place / "config.json").write_bytes(b"\xff\xfe\x00"), "not valid JSON"),
        (_cut("model.safetensors"), "is damaged"),
        (_flip, "is damaged"),
        (_edit(lambda d: d.update(colour="red")), "unknown field 'colour'"),
        (_edit(lambda d: d["config"].update(rope_theta=1)), "rope_theta: there is no such"),
        (_edit(lambda d: d["config"].update(dim=-4)), "dim: .*got -4"),
        (_edit(lambda d: d["config"].update(dim=32)), r"\[20, 16\].*\[20, 32\]"),
        (_edit(lambda d: d["config"].update(layers=3)), "Missing key"),
        (_edit(lambda d: d["config"].update(layers=1)), "Unexpected key"),
        (_edit(lambda d: d.update(format="other/1")), "does not describe a model"),
        (_edit(lambda d: d.update(config=[])), "not an object"),
        (_edit(lambda d: d.pop("weights_sha256")), "lacks the field 'weights_sha256'"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    save_model(_model(), tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(InputError, match=message):
        load_model(tmp_path / "model")


@pytest.mark.parametrize(("field", "value"), [("score", "CosA"), ("norm_eps", 0.25), ("heads", 4)])
def test_changed_settings_are_refused_where_no_size_tells(
    tmp_path: Path, field: str, value: object
) -> None:
    model = _model()
    save_model(model, tmp_path / "model")
    _edit(lambda d: d["config"].update({field: value}))(tmp_path / "model")
    with pytest.raises(InputError, match=r"config\.json was changed after the model was saved"):
        load_model(tmp_path / "model")
    with pytest.raises(InputError, match=rf"{field} is .* and .* in the run's configuration"):
        load_model(tmp_path / "model", model.config)
    # As models were saved before their settings had a digest.
    _edit(lambda d: d.pop("config_sha256"))(tmp_path / "model")
    with pytest.raises(InputError, match=rf"{field} is .* and .* in the run's configuration"):
        load_model(tmp_path / "model", model.config)
    own = getattr(model.config, field) if field != "score" else str(model.config.score)
    _edit(lambda d: d["config"].update({field: own}))(tmp_path / "model")
    assert load_model(tmp_path / "model", model.config).config == model.config

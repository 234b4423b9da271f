"""Saved models of ours: the round trip; of damage one sentence that names it, no memory taken."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from normattn.errors import InputError
from normattn.models import CausalLM, CausalLMConfig
from normattn.models.pretrained import load_any, load_model, save_model

from .foreign import CONFIG, WEIGHTS, Damage, changed, cut, edited, written

pytestmark = pytest.mark.usefixtures("little_memory")


def _model(**changes: Any) -> CausalLM:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"vocab_size": 20, "dim": 16, "layers": 2, "train_length": 8}
    return CausalLM(CausalLMConfig(**{**settings, "heads": 2, **changes}))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A saved model."""
    save_model(_model(tie_head=False), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    "changes",
    [
        {"score": "KNA-logn"},
        {"block": "gau", "heads": 1, "key_size": 8, "placement": "DeepNorm", "score": "CosA"},
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
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    ids = torch.randint(0, 20, (2, 12))
    assert torch.equal(loaded(ids), model(ids))
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert (loaded.head_weight is loaded.embedding.weight) == model.config.tie_head


def test_saving_twice_writes_the_same_bytes_and_replaces_the_first(place: Path) -> None:
    first = {file.name: file.read_bytes() for file in place.iterdir()}
    with (model := _model(tie_head=False)).using("NTK", factor=4):
        save_model(model, place)
    assert {file.name: file.read_bytes() for file in place.iterdir()} == first
    assert sorted(first) == [CONFIG, WEIGHTS]
    assert [entry.name for entry in place.parent.iterdir()] == ["model"]


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match=r"thesis\.txt"):
        save_model(_model(), tmp_path)
    with pytest.raises(InputError, match="is a file"):
        save_model(_model(), tmp_path / "thesis.txt")
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]


def _edit(change: Callable[[dict[str, Any]], object]) -> Damage:
    return edited(CONFIG, change)


def _set(**settings: Any) -> Damage:
    """Other settings, as if the model had been saved before settings had a digest."""
    return _edit(lambda d: [d["config"].update(settings), d.pop("config_sha256")])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda place: (place / CONFIG).unlink(), r"config\.json does not exist"),
        (lambda place: (place / WEIGHTS).unlink(), "safetensors does not exist"),
        (cut(CONFIG, 0.9), "not valid JSON"),
        (written(CONFIG, b"\xff\xfe\x00"), "not valid JSON"),
        (cut(WEIGHTS, 0.9), "is damaged"),
        (changed(WEIGHTS, lambda c: c[:-7] + bytes([c[-7] ^ 1]) + c[-6:]), "is damaged"),
        (_edit(lambda d: d.update(colour="red")), "unknown field 'colour'"),
        (_edit(lambda d: d["config"].update(rope_theta=1)), "rope_theta: there is no such"),
        (_edit(lambda d: d["config"].update(dim=-4)), "dim: .*got -4"),
        (_edit(lambda d: d["config"].update(dim=32)), r"\[20, 16\].*\[20, 32\]"),
        (_edit(lambda d: d["config"].update(layers=3)), "Missing key"),
        (_edit(lambda d: d["config"].update(layers=1)), "Unexpected key"),
        (_edit(lambda d: d.update(format="other/1")), "does not describe a model"),
        (_edit(lambda d: d.update(config=[])), "not an object"),
        (_edit(lambda d: d.pop("weights_sha256")), "lacks the field 'weights_sha256'"),
        (_set(dim=10**9), "model"),
        (_set(vocab_size=2**63), "model"),
        (_set(layers=10**8, shared_layers=True), "model"),
        (_set(heads=0), "model"),
        (_set(dim=16.5), "model"),
        (_set(train_length=10**12, score="Baseline"), "model"),
        (_set(score="KNA@" + "9" * 5000), "model"),
    ],
)
def test_damage_is_named(place: Path, damage: Damage, message: str) -> None:
    damage(place)
    with pytest.raises(InputError, match=message) as caught:
        load_model(place)
    assert len(str(caught.value)) < 2000


def _weights(change: Callable[[bytes], bytes]) -> Damage:
    """Other weights, whose digest is put right."""

    def damage(place: Path) -> None:
        changed(WEIGHTS, change)(place)
        digest = hashlib.sha256((place / WEIGHTS).read_bytes()).hexdigest()
        _edit(lambda d: d.update(weights_sha256=digest))(place)

    return damage


def _integers(content: bytes) -> bytes:
    tensors = safetensors.torch.load(content)
    return safetensors.torch.save({name: each.to(torch.int64) for name, each in tensors.items()})


DAMAGES: dict[str, Damage] = {
    "empty": _weights(lambda content: b""),
    "pickled": _weights(lambda content: pickle.dumps([1])),
    "absurd header": _weights(lambda content: b"\xff" * 64),
    "cut": _weights(lambda content: content[:-40]),
    "whole numbers": _weights(_integers),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_with_a_right_digest_are_read_with_care(damage: str, place: Path) -> None:
    DAMAGES[damage](place)
    with pytest.raises(InputError, match=r"model\.safetensors"):
        load_any(place)


@pytest.mark.parametrize(("field", "value"), [("score", "CosA"), ("norm_eps", 0.25), ("heads", 4)])
def test_changed_settings_are_refused(place: Path, field: str, value: object) -> None:
    config = load_model(place).config
    own = getattr(config, field) if field != "score" else str(config.score)
    _edit(lambda d: d["config"].update({field: value}))(place)
    with pytest.raises(InputError, match=r"config\.json was changed after the model was saved"):
        load_model(place)
    with pytest.raises(InputError, match=rf"{field} is .* and .* in the run's configuration"):
        load_model(place, config)
    _set()(place)
    with pytest.raises(InputError, match=rf"{field} is .* and .* in the run's configuration"):
        load_model(place, config)
    _edit(lambda d: d["config"].update({field: own}))(place)
    assert load_model(place, config).config == config

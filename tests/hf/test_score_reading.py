"""The score of a model's layers, read off them: every recipe's, and what has no name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from normattn import ScoreSpec, score_of
from normattn.cli.app import app
from normattn.score.recipes import RECIPES

from .families import FAMILIES, configuration, model_of
from .test_recipes import _SIZES, _configuration, _model, _small


def _tiny(name: str) -> tuple[Any, ScoreSpec, int]:
    spec = ScoreSpec.parse(_small(name))
    family, more, layers = _configuration(name, spec)
    kept = {key: value for key, value in _SIZES.items() if key != "head_dim" or family != "Olmo2"}
    make = getattr(transformers, f"{family}Config")
    config = make(**{**kept, "num_hidden_layers": layers, **more})
    return _model(family, config), spec, layers


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_is_read_back(name: str) -> None:
    model, spec, layers = _tiny(name)
    found = score_of(model)
    assert found.verified, str(found)
    assert len(found.layers) == (1 if name == "Qwen3-Next" else layers)
    for each in found.layers:
        assert each.spec is not None
        expected = spec.layer(each.layer, layers)
        if name == "Llama-4":
            # Without a gain the order of norm and rotation does not matter.
            expected = ScoreSpec.parse(str(expected).replace("-RotateFirst", ""))
        assert str(each.spec) == str(expected)
        assert each.difference is not None
        assert each.difference < 1e-5


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_families_of_the_other_tests_are_read(family: str) -> None:
    before = model_of(family)
    implementation = before.config._attn_implementation
    found = score_of(before, tokens=24)
    assert found.verified, str(found)
    assert before.config._attn_implementation == implementation


def test_a_layer_without_a_name_says_what_is_missing() -> None:
    model = model_of("Llama")
    layer = model.model.layers[1].self_attn
    handle = layer.q_proj.register_forward_hook(lambda _, given, made: made.sin())
    try:
        found = score_of(model, tokens=24)
    finally:
        handle.remove()
    assert found.layers[0].verified
    assert found.layers[1].spec is not None or found.layers[1].lacks is not None
    before = layer.scaling
    try:
        layer.scaling = before * 1.5
        assert "scale=" in str(score_of(model, tokens=24).layers[1].spec)
    finally:
        layer.scaling = before
    turned = layer.forward

    def strange(hidden_states: Any, position_embeddings: Any, **more: Any) -> Any:
        cos, sin = position_embeddings
        return turned(hidden_states, position_embeddings=(cos * 0.5 + 0.5, sin), **more)

    layer.forward = strange
    try:
        found = score_of(model, tokens=24)
    finally:
        del layer.forward
    assert found.layers[0].verified
    assert not found.verified
    assert found.layers[1].spec is None
    assert found.layers[1].lacks is not None
    assert "layer 1 (LlamaAttention)" in found.layers[1].lacks


def test_reading_changes_nothing() -> None:
    model = model_of("Gemma3")
    ids = torch.arange(2, 22)[None]
    with torch.no_grad():
        before = model(ids).logits
        score_of(model, tokens=24)
        assert torch.equal(model(ids).logits, before)


def test_the_command_names_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configuration("Qwen3").save_pretrained(tmp_path)
    app(args=["score", str(tmp_path), "--tokens", "16"], standalone_mode=False)
    out = capsys.readouterr().out
    assert "qwen3, 2 attention layers" in out
    assert "layer 0-1: QKRMSNorm (verified on 16 tokens" in out
    words = ["score", str(tmp_path / "config.json"), "--json", "--tokens", "16"]
    app(args=words, standalone_mode=False)
    record = json.loads(capsys.readouterr().out)
    assert record["verified"]
    assert [each["score"] for each in record["layers"]] == ["QKRMSNorm"] * 2
